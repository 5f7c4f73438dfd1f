"""A platform that computes nothing, to measure the engine's own cost."""
