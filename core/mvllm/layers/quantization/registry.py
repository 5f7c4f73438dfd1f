"""Quantization methods by name. A method's module is imported when it is resolved.

Other packages add methods through entry points of `mvllm.quantization`: the name is the `quant_method` in config.json
or the setting `quantization`, the value `package.module:Class`, a QuantizationMethod. Core's method takes precedence
over a plugin's of the same name. The name of a checkpoint format is that of the blocks in its files
(`BlockQuantization`).
"""

from __future__ import annotations

import importlib

from mvllm import plugin_groups
from mvllm.checkpoint_formats.registry import format_names
from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.quantization import method_name, stored_quantization
from mvllm.errors import ConfigError, ModelError, MvllmError
from mvllm.layers.quantization.interface import QuantizationMethod
from mvllm.logging import get_logger

logger = get_logger(__name__)

_METHODS = {
    "awq": "mvllm.layers.quantization.awq:AWQ",
    "compressed-tensors": "mvllm.layers.quantization.compressed_tensors:CompressedTensors",
    "fbgemm-fp8": "mvllm.layers.quantization.float8:RowwiseFloat8",
    "fp8": "mvllm.layers.quantization.float8:Float8",
    "gptq": "mvllm.layers.quantization.gptq:GPTQ",
    "int4": "mvllm.layers.quantization.online_quantization:Int4",
    "int8": "mvllm.layers.quantization.online_quantization:Int8",
    "mxfp4": "mvllm.layers.quantization.mxfp4:MXFP4",
}

_OF_FORMATS = "mvllm.layers.quantization.block_quantization:BlockQuantization"


def supported_methods() -> tuple[str, ...]:
    """Names of the supported methods, sorted: core's and those of installed plugins."""
    return tuple(sorted({*_METHODS, *format_names(), *plugin_groups.allowed_names(plugin_groups.QUANTIZATION)}))


def quantization_method(config: ModelConfig) -> QuantizationMethod | None:
    """The quantization method of a model, with its settings; None for an unquantized model.

    Raises:
        ConfigError: The method does not exist, cannot be loaded, or does not fit this checkpoint.
        ModelError: The checkpoint's settings are wrong or not supported.
    """
    if config.quantization is None:
        return None
    stored = stored_quantization(config.hf_config)
    if stored is not None and stored[0] != config.quantization:
        stored = None  # the weights are read as floats, and quantized while they are loaded
    method = _resolve(config.quantization, stored_as=None if stored is None else stored[1].source)
    if stored is not None:
        return _made(method, stored[1])
    if not method.quantizes_on_load:
        raise ConfigError(
            f"quantization is {config.quantization!r}, which is a way to store weights, but {config.hf_config.source} "
            "names no quantization: the checkpoint is not quantized. Leave it out, or quantize while loading "
            "with quantization='int8' or quantization='int4'."
        )
    return _made(method, HFConfig({}, f"quantization={config.quantization!r}"))


def _made(method: type[QuantizationMethod], settings: HFConfig) -> QuantizationMethod:
    try:
        return method.from_config(settings)
    except (MvllmError, KeyboardInterrupt):
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(
            f"{settings.source}: the quantization method {method.__module__}:{method.__qualname__} failed over these "
            f"settings: {type(e).__name__}: {e}. Ask its author, or take the unquantized checkpoint of the same model."
        ) from e


def _resolve(name: str, stored_as: str | None) -> type[QuantizationMethod]:
    if name in _METHODS or name in format_names():
        for plugin in plugin_groups.list_plugins(plugin_groups.QUANTIZATION):
            if method_name(plugin.name) == name:
                logger.warning("%s has a method %s, but core's own method is used.", plugin, name)
        module, _, attribute = _METHODS.get(name, _OF_FORMATS).partition(":")
        method: type[QuantizationMethod] = getattr(importlib.import_module(module), attribute)
        return method
    spelled = {
        source.name
        for source in plugin_groups.list_plugins(plugin_groups.QUANTIZATION)
        if method_name(source.name) == name
    }
    source = plugin_groups.find(plugin_groups.QUANTIZATION, min(spelled, default=name))
    if source is None:
        if stored_as is None:
            raise ConfigError(
                f"quantization is {name!r}, and there is no such method. The methods: {', '.join(supported_methods())}."
            )
        raise ModelError(
            f"{stored_as}: the checkpoint is quantized by the method {name!r}, which is not supported. Supported: "
            f"{', '.join(supported_methods())}. Take the unquantized checkpoint of the same model; quantization='int8' "
            "or 'int4' quantizes that while it is loaded."
        )
    return plugin_groups.load_class(plugin_groups.QUANTIZATION, source, QuantizationMethod, "QuantizationMethod")
