"""GGUF files for mvllm: weights, config and tokenizer of llama.cpp's format."""
