"""The served model in the format of the Ollama API: lists, details and capabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mvllm.extension_api import ModelConfig
from mvllm.extension_api.http import OpenAIServingModels, ServingContext

DEFAULT_TAG = ":latest"
"""What clients add to names of models that have no tag."""

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SHORT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
_NEVER = "9999-12-31T23:59:59Z"


def canonical_name(models: OpenAIServingModels, name: str | None) -> str | None:
    """The served name that a request means: `name` and `name:latest` are the same. An unknown name stays."""
    if name is None or name in models.names:
        return name
    other = name.removesuffix(DEFAULT_TAG) if name.endswith(DEFAULT_TAG) else name + DEFAULT_TAG
    return other if other in models.names else name


def list_entry(card: Mapping[str, Any], config: ModelConfig | None, size: int) -> dict[str, Any]:
    """An entry of `/api/tags`.

    Args:
        card: The entry of `/v1/models`.
        config: The model's, if it is loaded.
        size: Bytes of the weights.
    """
    name = _with_tag(card["id"])
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": model_details(config, size, card.get("parent")),
    }


def running_entry(card: Mapping[str, Any], config: ModelConfig, size: int) -> dict[str, Any]:
    """An entry of `/api/ps`: a loaded model. Arguments as for `list_entry`."""
    entry = list_entry(card, config, size)
    del entry["modified_at"]
    return {**entry, "expires_at": _NEVER, "size_vram": size, "context_length": config.max_model_len}


def show_response(card: Mapping[str, Any], context: ServingContext, size: int, template: str) -> dict[str, Any]:
    """The response of `/api/show`.

    Args:
        card: The entry of `/v1/models`.
        context: The engine, and the parsers of the model's output.
        size: Bytes of the weights.
        template: The chat template; empty for none.
    """
    config = context.engine.model_config
    family = _family(config)
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in config.generation_defaults.items()),
        "template": template,
        "details": model_details(config, size, card.get("parent")),
        "model_info": {
            "general.architecture": family,
            **({"general.parameter_count": count} if (count := _num_parameters(config, size)) else {}),
            f"{family}.context_length": config.max_model_len,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.attention.head_count": config.num_heads,
            f"{family}.attention.head_count_kv": config.num_kv_heads,
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": capabilities(context),
        "modified_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def model_details(config: ModelConfig | None, size: int, parent: str | None) -> dict[str, Any]:
    """Format, family, size and quantization of a model; empty texts for what is not known.

    Args:
        config: The model's, if it is loaded.
        size: Bytes of its weights.
        parent: For a LoRA adapter, the name of its model.
    """
    if config is None:
        family = quantization = parameters = kind = ""
    else:
        family = _family(config)
        quantization = config.quantization or _SHORT_DTYPES.get(config.checkpoint_dtype, config.checkpoint_dtype)
        parameters = _short_number(_num_parameters(config, size))
        kind = "gguf" if config.model.endswith(".gguf") else "safetensors"
    return {
        "parent_model": parent or "",
        "format": kind,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": parameters,
        "quantization_level": quantization,
    }


def capabilities(context: ServingContext) -> list[str]:
    """What the model can do, in Ollama's words. Its clients send images to models with `vision` only."""
    kind, renderer = context.engine.model_config.kind, context.prompt_renderer
    if not kind.generates:
        return ["embedding"] if kind.is_embedder else []
    found = ["completion"]
    if renderer.tool_parser is not None:
        found.append("tools")
    if renderer.reasoning_parser is not None:
        found.append("thinking")
    if "image" in context.modalities:
        found.append("vision")
    return found


def _with_tag(name: str) -> str:
    return name if ":" in name else name + DEFAULT_TAG


def _family(config: ModelConfig) -> str:
    found = config.hf_config.get("model_type")
    return found if isinstance(found, str) else ""


def _num_parameters(config: ModelConfig, size: int) -> int:
    """The number of parameters, by the bytes of the weights; 0 if they are quantized."""
    width = None if config.quantization else _BYTES.get(config.checkpoint_dtype)
    return size // width if width else 0


def _short_number(value: int) -> str:
    for unit, name in _UNITS:
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return ""
