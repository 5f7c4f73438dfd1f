"""Load generators and sweeps for mvllm: `mvllm bench`."""
