"""Resolves the name of a model's quantization method: the checkpoint's, or the setting `quantization`.

The methods in `mvllm.layers.quantization` read the settings.
"""

from __future__ import annotations

from mvllm.checkpoint_formats.registry import format_names
from mvllm.config.hf_config import HFConfig
from mvllm.errors import ConfigError, ModelError

_KEYS = ("quantization_config", "compression_config")


def stored_quantization(hf_config: HFConfig) -> tuple[str, HFConfig] | None:
    """The method of a quantized checkpoint and its settings; None for an unquantized checkpoint.

    Raises:
        ModelError: The config has a quantization without the name of its method.
    """
    key = next((key for key in _KEYS if hf_config.get(key)), None)
    if key is None:
        return None
    values, where = hf_config.get(key), f"{hf_config.source}: {key}"
    if not isinstance(values, dict):
        raise ModelError(f"{where} should be an object with a 'quant_method', found {values!r}.")
    name = values.get("quant_method", "compressed-tensors" if "config_groups" in values else None)
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"{where} says that the checkpoint is quantized, but its 'quant_method' is {name or 'not named'!r}. Use "
            "the unquantized checkpoint of the same model; quantization='int8' or quantization='int4' quantizes it "
            "while it loads."
        )
    return method_name(name), HFConfig(values, where)


def method_name(text: str) -> str:
    """The normalised name of a method: checkpoints have both `compressed-tensors` and `compressed_tensors`."""
    return text.lower().replace("_", "-")


def resolve_quantization(hf_config: HFConfig, requested: str | None) -> str | None:
    """The name of the model's quantization method, or None.

    Raises:
        ConfigError: The checkpoint is quantized by another method than the setting.
        ModelError: As `stored_quantization`.
    """
    stored = stored_quantization(hf_config)
    if stored is None:
        return None if requested is None else method_name(requested)
    name, settings = stored
    if requested is not None and name in format_names():
        return method_name(requested)  # checkpoint formats provide their blocks as floats too, to quantize on load
    if requested is not None and method_name(requested) != name:
        raise ConfigError(
            f"quantization is {requested!r}, but the weights of this checkpoint are stored as {name!r} already "
            f"({settings.source}). Leave it out, or take the unquantized checkpoint of the same model."
        )
    return name
