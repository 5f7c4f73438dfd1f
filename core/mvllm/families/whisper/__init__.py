"""Whisper."""
