"""GGUF files: header, tensor types, and what the metadata says about model and tokenizer."""
