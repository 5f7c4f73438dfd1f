"""Public names for LoRA adapters: `mvllm.lora.request`."""
