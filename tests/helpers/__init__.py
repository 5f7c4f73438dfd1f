"""Builders that tests of several tiers share."""
