"""Reference attention, and 8-bit storage of keys and values."""
