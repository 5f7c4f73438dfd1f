"""Encoders of audio."""
