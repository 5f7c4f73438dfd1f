"""Mistral 4."""
