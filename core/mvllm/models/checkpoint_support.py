"""Can this engine run that checkpoint? Asked before any process is started or weight is read; imports no model."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.registry import is_native, supported_architectures
from mvllm.models.transformers_backend.supported_classes import unsupported_reason


def check_architecture(config: ModelConfig) -> None:
    """Refuses a checkpoint that no model class here can run.

    A folder may bring Python code of its own (`auto_map`). Where the architecture is one of ours, that code is not
    looked at; where it is not, transformers' own class is the only other way to run it.

    Raises:
        ModelError: Says what was found and what is supported.
        ConfigError: An installed plugin has it, but is not let in, or several have it.
    """
    if runs_natively(config):
        return
    reason = "It has no class here, and model_impl is 'native'."
    if config.model_impl != "native":
        found = unsupported_reason(config.architecture)
        if found is None:
            return
        reason = found[0].upper() + found[1:]
    code = ""
    if "auto_map" in config.hf_config:
        permission = "with" if config.trust_remote_code else "without"
        code = (
            f" The folder brings its own model code (auto_map), which is not run: {permission} trust_remote_code, only "
            "architectures that are supported natively, or by transformers itself, can be run."
        )
    raise ModelError(
        f"{config.hf_config.source}: the architecture {config.architecture!r} is not supported.{code} {reason} "
        f"Supported natively: {', '.join(supported_architectures())}."
    )


def runs_natively(config: ModelConfig) -> bool:
    """Whether a class of core or of an installed plugin runs the checkpoint, and not transformers' own.

    Raises:
        ConfigError: An installed plugin has it, but is not let in, or several have it.
    """
    return config.model_impl != "transformers" and is_native(config.architecture)


def check_quantization(config: ModelConfig, load_format: str = "auto") -> None:
    """Refuses a quantization that there is none of, or a variant of one that is not supported.

    Raises:
        ConfigError: The setting names no method, or one that is not for this checkpoint, or a plugin's that is not let
            in; or random weights are wanted in a form that has to be packed.
        ModelError: The checkpoint's `quantization_config` says what is not supported.
    """
    method = quantization_method(config)
    if load_format == "dummy" and method is not None and not method.quantizes_on_load:
        raise ConfigError(
            f"load_format='dummy' makes random floats, but this model's weights are stored as {config.quantization!r}. "
            "Pass hf_overrides={'quantization_config': {}}, and quantization='int8' or 'int4' to quantize them."
        )
