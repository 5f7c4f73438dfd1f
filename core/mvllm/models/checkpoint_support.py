"""Checks that the engine supports a checkpoint, before a process is started or weights are read. Imports no model."""

from __future__ import annotations

from mvllm.config import model_implementations
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.registry import supported_architectures

_CONVERTED = {
    "MultiModalityCausalLM": " For Janus and Janus-Pro use a checkpoint in transformers' format, such as "
    "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B."
}
"""Hints for architectures of original checkpoints, which were converted for transformers under other names."""


def check_architecture(config: ModelConfig) -> None:
    """Checks that a model class or a ModelImplementation supports a checkpoint's architecture.

    A folder may contain its own Python code (`auto_map`), which is never used.

    Raises:
        ModelError: It is not supported; the message lists the supported ones.
        ConfigError: An installed plugin has it, but is not allowed, or several have it; or that of the implementation
            cannot be loaded.
    """
    if runs_natively(config):
        return
    reason = "It has no class here, and model_impl is 'native'."
    name = model_implementations.implementation_name(config.model_impl)
    if name is not None:
        found = _unsupported_spaces(config, name) or model_implementations.unsupported_reason(config.architecture, name)
        if found is None:
            return
        reason = found[0].upper() + found[1:]
    code = _CONVERTED.get(config.architecture, "")
    if "auto_map" in config.hf_config:
        permission = "with" if config.trust_remote_code else "without"
        code += (
            f" The folder brings its own model code (auto_map), which is not run: {permission} trust_remote_code, only "
            "architectures that are supported natively, or by transformers itself, can be run."
        )
    verdict = "is not supported"
    if model_implementations.names_implementation(config.model_impl):
        verdict += f" with model_impl={config.model_impl!r}"
    raise ModelError(
        f"{config.hf_config.source}: the architecture {config.architecture!r} {verdict}.{code} {reason} "
        f"Supported natively: {', '.join(supported_architectures())}."
    )


def _unsupported_spaces(config: ModelConfig, name: str) -> str | None:
    if not config.token_spaces:
        return None
    spaces = ", ".join(config.token_spaces)
    return f"the implementation {name!r} gives no tokens of {spaces}, which this model is for."


def runs_natively(config: ModelConfig) -> bool:
    """Whether a class of core or of an installed plugin runs the checkpoint, not a ModelImplementation.

    Raises:
        ConfigError: An installed plugin has it, but is not allowed, or several have it.
    """
    return model_implementations.runs_natively(config.architecture, config.model_impl)


def check_quantization(config: ModelConfig, load_format: str = "auto") -> None:
    """Checks that the quantization method and its variant are supported.

    Raises:
        ConfigError: The method is unknown, not for this checkpoint, or of a plugin that is not allowed; or
            load_format='dummy' is set for packed weights.
        ModelError: The checkpoint's `quantization_config` is not supported.
    """
    method = quantization_method(config)
    if load_format == "dummy" and method is not None and not method.quantizes_on_load:
        raise ConfigError(
            f"load_format='dummy' makes random floats, but this model's weights are stored as {config.quantization!r}. "
            "Pass hf_overrides={'quantization_config': {}}, and quantization='int8' or quantization='int4' to quantize them."
        )
