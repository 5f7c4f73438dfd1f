"""Helpers for tests of several tiers."""
