"""Public name of the request for a LoRA adapter."""

from mvllm.messages.lora import LoRARequest

__all__ = ["LoRARequest"]
