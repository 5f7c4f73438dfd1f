"""What `mvllm bench` measures with: prompts, a client, and the figures made of what it saw."""
