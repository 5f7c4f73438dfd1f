"""For packages with models like core's: base classes, beside the layers of `mvllm.extension_api`."""

from __future__ import annotations

from mvllm.layers.activation import activation as activation
from mvllm.models.llama import LlamaForCausalLM as LlamaForCausalLM

__all__ = ["LlamaForCausalLM", "activation"]
