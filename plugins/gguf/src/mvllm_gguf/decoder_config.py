"""The keys of config.json that decoders of many families have, from the metadata and tensors of a GGUF file."""

from __future__ import annotations

from typing import Any

from mvllm_gguf.metadata import Metadata
from mvllm_gguf.rope_config import rope_config

_PARTIAL_ROTARY = (
    "phi3",
    "glm4",
    "chatglm",
    "glm4moe",
    "minimax-m2",
    "granitehybrid",
    "qwen3next",
    "qwen35",
    "qwen35moe",
)
_MIXED_LAYERS = ("granitehybrid", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
"""Architectures whose files store per layer what only some layers have: zero in the others."""


def decoder(values: Metadata, architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    """The keys of all families except GPT-2, and `settings`."""
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    max_position = values.integer("context_length")
    if "num_key_value_heads" not in settings:
        read = values.nonzero if values.architecture in _MIXED_LAYERS else values.integer
        settings["num_key_value_heads"] = read("attention.head_count_kv", num_heads)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(values),
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_position,
        **settings,
    }


def gated(values: Metadata, architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    """The keys of Llama-like families: heads of one size, RoPE, RMSNorm and gated MLPs."""
    size = head_dim(values)
    expert_size = values.integer("expert_feed_forward_length") if "expert_feed_forward_length" in values else None
    config = decoder(
        values,
        architecture,
        model_type,
        head_dim=size,
        intermediate_size=values.integer("feed_forward_length", expert_size),
        hidden_act="silu",
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
    )
    partial = values.architecture in _PARTIAL_ROTARY
    rope = rope_config(values, size, config["max_position_embeddings"], partial=partial)
    return {**config, **rope, **settings}


def num_layers(values: Metadata) -> int:
    """Number of layers without those for multi-token prediction, which are stored last."""
    count = values.integer("block_count") - values.integer("nextn_predict_layers", 0, at_least=0)
    if not 1 <= count <= values.num_tensors:
        raise values.error(
            f"has {count} layers according to '{values.architecture}.block_count', but no tensors for them"
        )
    return count


def num_mtp_modules(values: Metadata) -> int:
    """Number of modules for multi-token prediction; 0 for files that mention them and do not have their tensors."""
    names = ("nextn.eh_proj.weight", "attn_norm.weight")
    has_first = any(values.has_tensor(f"blk.{num_layers(values)}.{name}") for name in names)
    return values.integer("nextn_predict_layers", 0, at_least=0) if has_first else 0


def head_dim(values: Metadata) -> int:
    """Elements per head."""
    usual = values.integer("embedding_length") // values.integer("attention.head_count")
    size = values.integer("attention.key_length", usual)
    if values.integer("attention.value_length", usual) != size:
        raise values.error("has different values as attention.key_length and attention.value_length, expected one size")
    return size


def has(values: Metadata, *names: str) -> bool:
    """Whether any layer has one of these tensors."""
    return any(values.has_tensor(f"blk.{layer}.{name}") for layer in range(num_layers(values)) for name in names)


def layer_kinds(values: Metadata, state_tensor: str, kind: str) -> list[str]:
    """`layer_types` of a hybrid: `kind` for layers that have the tensor `state_tensor`, else `full_attention`."""
    layers = range(num_layers(values))
    return [kind if values.has_tensor(f"blk.{layer}.{state_tensor}") else "full_attention" for layer in layers]


def attention_bias(values: Metadata) -> bool:
    """Whether queries have biases."""
    return has(values, "attn_q.bias", "attn_qkv.bias")


def window_types(values: Metadata, pattern: int) -> list[str]:
    """`layer_types` of a family in which the last of every `pattern` layers has no window.

    A file may store another pattern, or a list of flags, one per layer: whether it has a window.
    """
    count, stored = num_layers(values), values.list_or_integer("attention.sliding_window_pattern", pattern)
    if isinstance(stored, list):
        if len(stored) != count:
            raise values.error(f"has {len(stored)} sliding window flags, expected one for each of {count} layers")
        windows = [bool(flag) for flag in stored]
    else:
        windows = [stored == 0 or layer % stored < stored - 1 for layer in range(count)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def num_experts(values: Metadata) -> int:
    """The number of experts. Checks that routers have as many rows, as models are built before weights are read."""
    count = values.integer("expert_count")
    for layer in range(num_layers(values)):
        name = f"blk.{layer}.ffn_gate_inp.weight"
        if values.has_tensor(name) and (shape := values.tensor(name).shape)[0] != count:
            raise values.error(f"has tensor {name!r} of shape {list(shape)}, expected rows for {count} experts")
    return count


def rows_of(values: Metadata, name: str, key: str) -> int:
    """The value of `key`; for old files without it, the output features of a layer's tensor."""
    if key in values:
        return values.integer(key)
    layers = (f"blk.{layer}.{name}" for layer in range(num_layers(values)))
    first = next((layer for layer in layers if values.has_tensor(layer)), f"blk.0.{name}")
    shape = values.tensor(first).shape
    return shape[-2] if len(shape) > 1 else shape[0]
