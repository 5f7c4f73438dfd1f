"""Architectures by the names that `config.json` uses. A model's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.errors import ModelError

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

_MODELS = {
    "LlamaForCausalLM": "mvllm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "mvllm.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "mvllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "mvllm.models.qwen3:Qwen3ForCausalLM",
    "OPTForCausalLM": "mvllm.models.opt:OPTForCausalLM",
    "GPT2LMHeadModel": "mvllm.models.gpt2:GPT2LMHeadModel",
}


def supported_architectures() -> tuple[str, ...]:
    """Names that `resolve_model_class` takes, sorted."""
    return tuple(sorted(_MODELS))


def resolve_model_class(architecture: str) -> type[CausalLM]:
    """The class that runs checkpoints of `architecture`.

    Raises:
        ModelError: There is none; the message lists those there are.
    """
    path = _MODELS.get(architecture)
    if path is None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}."
        )
    module, _, name = path.partition(":")
    model_class: type[CausalLM] = getattr(importlib.import_module(module), name)
    return model_class
