"""Which quantization method a model runs with: the one that its checkpoint names, or the one that was asked for.

Only names are settled here. What a method's settings mean is the method's own to say (`mvllm.layers.quantization`).
"""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ConfigError, ModelError

_KEYS = ("quantization_config", "compression_config")


def stored_quantization(hf_config: HFConfig) -> tuple[str, HFConfig] | None:
    """The method by which a checkpoint's weights are stored, and its settings; None where they are plain numbers.

    Raises:
        ModelError: The config announces a quantization and does not name its method.
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
            f"{where} says that the checkpoint is quantized, but its 'quant_method' is {name or 'not named'!r}. Take "
            "the unquantized checkpoint of the same model; quantization='int8' or 'int4' quantizes it while it loads."
        )
    return method_name(name), HFConfig(values, where)


def method_name(text: str) -> str:
    """A method's name as it is compared: checkpoints write `compressed-tensors` and `compressed_tensors`."""
    return text.lower().replace("_", "-")


def resolve_quantization(hf_config: HFConfig, asked: str | None) -> str | None:
    """The name of the method that the model runs with, or None.

    Raises:
        ConfigError: The checkpoint is quantized by another method than the one asked for.
        ModelError: As `stored_quantization`.
    """
    stored = stored_quantization(hf_config)
    if stored is None:
        return None if asked is None else method_name(asked)
    name, settings = stored
    if asked is not None and method_name(asked) != name:
        raise ConfigError(
            f"quantization is {asked!r}, but the weights of this checkpoint are stored as {name!r} already "
            f"({settings.source}). Leave quantization out, or take the unquantized checkpoint of the same model."
        )
    return name
