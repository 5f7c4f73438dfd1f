"""Reasoning parsers, one module per format."""
