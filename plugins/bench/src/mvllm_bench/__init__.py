"""The benchmarks of `mvllm bench`: datasets, an HTTP client, measurement loops, metrics and reports."""
