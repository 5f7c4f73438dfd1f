"""Checks that an architecture can be run, before anything else of config.json is read."""

from __future__ import annotations

import difflib

from mvllm import plugin_groups
from mvllm.config import model_implementations
from mvllm.config.families import core_architectures
from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError

_CONVERTED = {
    "MultiModalityCausalLM": " For Janus and Janus-Pro use a checkpoint in transformers' format, such as "
    "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B."
}
"""Hints for architectures of original checkpoints, which were converted for transformers under other names."""
_HEADS = ("ForConditionalGeneration", "ForSequenceClassification", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model")
_NUM_SIMILAR = 3


def supported_architectures() -> tuple[str, ...]:
    """Native architectures, sorted: core's and those of installed plugins."""
    return tuple(sorted({*core_architectures(), *plugin_groups.allowed_names(plugin_groups.MODELS)}))


def check_architecture_name(architecture: str, model_impl: str, hf_config: HFConfig) -> None:
    """Checks that a model class or a ModelImplementation runs an architecture.

    A folder may contain its own Python code (`auto_map`), which is never used.

    Args:
        architecture, model_impl: As in ModelConfig.
        hf_config: The checkpoint's, for the message.

    Raises:
        ModelError: None does. The message has the reason and the architectures with similar names.
        ConfigError: An installed plugin has it, but is not allowed, or several have it; or that of the implementation
            cannot be loaded.
    """
    if model_implementations.runs_natively(architecture, model_impl):
        return
    name = model_implementations.implementation_name(model_impl)
    reason: str | None
    if hf_config.get("is_encoder_decoder"):
        reason = "It is an encoder with a decoder that attends to it; of such models only Whisper is supported."
    elif name is None:
        reason = "It has no class here, and model_impl is 'native'."
    else:
        reason = model_implementations.unsupported_reason(architecture, name)
    if reason is not None:
        raise unsupported_architecture(architecture, model_impl, hf_config, reason)


def unsupported_architecture(architecture: str, model_impl: str, hf_config: HFConfig, reason: str) -> ModelError:
    """The error for an architecture that cannot be run for this reason, a sentence."""
    verdict = "is not supported"
    if model_implementations.names_implementation(model_impl):
        verdict += f" with model_impl={model_impl!r}"
    text = f"{hf_config.source}: the architecture {architecture!r} {verdict}. {reason[0].upper() + reason[1:]}"
    if "auto_map" in hf_config:
        text += " The folder's own model code (auto_map) is never run, with or without trust_remote_code."
    text += _CONVERTED.get(architecture, "")
    if similar := _similar(architecture):
        text += f" Supported ones with similar names: {', '.join(similar)}."
    return ModelError(f"{text} The page docs/reference/models.md lists all that are.")


def _similar(architecture: str) -> list[str]:
    """Supported architectures with similar names, the most similar first; of names alike but for the head, one."""
    bases: dict[str, str] = {}
    for name in supported_architectures():
        bases.setdefault(_base(name).lower(), name)
    found = difflib.get_close_matches(_base(architecture).lower(), list(bases), n=_NUM_SIMILAR, cutoff=0.7)
    return [bases[base] for base in found]


def _base(architecture: str) -> str:
    """The name without that of the head: `Llama` of `LlamaForCausalLM`."""
    return next((architecture.removesuffix(head) for head in _HEADS if architecture.endswith(head)), architecture)
