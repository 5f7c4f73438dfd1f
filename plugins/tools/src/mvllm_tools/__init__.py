"""Commands around the engine: chat in a terminal, models in the local caches, and a report for bug reports."""
