"""Executors: run the workers of an engine in its process, in child processes, or under an external launcher."""
