"""Policies of admission: which waiting requests start in a step. See `policy.py`."""
