"""A platform that computes nothing: for measuring what the engine itself costs."""
