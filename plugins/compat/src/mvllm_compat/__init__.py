"""Other servers' APIs on mvllm's server: Ollama's and Anthropic's."""
