"""How families of models write calls, one module each."""
