"""Entry points: the class LLM, the command line, the HTTP server, and the benchmarks."""
