"""How families of models write their thoughts, one module each."""
