"""The MLX platform of mvllm: Apple silicon, and processors under Linux."""
