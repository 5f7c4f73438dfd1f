"""Decides what the workers compute next. Knows requests, tokens and blocks; no tensor, no device."""
