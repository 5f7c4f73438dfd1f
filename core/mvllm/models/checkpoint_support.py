"""Checks that the engine supports a checkpoint, before a process is started or weights are read. Imports no model."""

from __future__ import annotations

from mvllm.config import model_implementations
from mvllm.config.architecture_support import check_architecture_name, unsupported_architecture
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError
from mvllm.layers.quantization.registry import quantization_method


def check_architecture(config: ModelConfig) -> None:
    """Checks that a model class or a ModelImplementation supports a checkpoint's architecture.

    A folder may contain its own Python code (`auto_map`), which is never used.

    Raises:
        ModelError: It is not supported; the message names similar ones that are.
        ConfigError: An installed plugin has it, but is not allowed, or several have it; or that of the implementation
            cannot be loaded.
    """
    if runs_natively(config):
        return
    name = model_implementations.implementation_name(config.model_impl)
    if name is not None and (reason := _unsupported_spaces(config, name)) is not None:
        raise unsupported_architecture(config.architecture, config.model_impl, config.hf_config, reason)
    check_architecture_name(config.architecture, config.model_impl, config.hf_config)


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
            "Pass hf_overrides={'quantization_config': {}}, and quantization='int8' or quantization='int4' to quantize "
            "them."
        )
