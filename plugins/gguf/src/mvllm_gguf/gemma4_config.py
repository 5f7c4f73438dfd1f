"""The keys of config.json for the text model of Gemma 4.

Layers with and without a window have heads of different sizes, and in some models different numbers of key/value heads.
The file has one factor for each frequency of layers without a window: 1 for those that rotate, and a huge one for the
others.

Source: convert_hf_to_gguf.py and src/models of llama.cpp.
"""

from __future__ import annotations

import math
from typing import Any

from mvllm_gguf.decoder_config import attention_bias, decoder, num_experts, num_layers, window_types
from mvllm_gguf.metadata import Metadata

_FACTORS = "rope_freqs.weight"
_STILL = 1e29  # a frequency divided by more than this does not rotate
_FULL = "full_attention"


def gemma4(values: Metadata) -> dict[str, Any]:
    """The keys of config.json.

    Raises:
        ModelError: The last layer has a window, layers of one kind differ, or a key or tensor is missing.
    """
    kinds = window_types(values, 6)
    if kinds[-1] != _FULL:
        raise values.error("has a sliding window in the last layer, expected none there")
    own = num_layers(values) - values.integer("attention.shared_kv_layers", 0, at_least=0)
    if own < 1:
        raise values.error(f"has 'gemma4.attention.shared_kv_layers' for all of its {num_layers(values)} layers")
    wide, size = _mlp_sizes(values, own)
    config = decoder(
        values,
        "Gemma4ForCausalLM",
        "gemma4_text",
        head_dim=_head_size(values, "_swa"),
        num_key_value_heads=_kv_heads(values, kinds, "sliding_attention"),
        intermediate_size=size,
        use_double_wide_mlp=wide,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        attention_bias=attention_bias(values),
        sliding_window=values.integer("attention.sliding_window"),
        layer_types=kinds,
        attention_k_eq_v=_keys_are_values(values, kinds, own),
        num_kv_shared_layers=num_layers(values) - own,
        final_logit_softcapping=None,
        stacked_experts=False,  # the file's experts are read one by one
    )
    if "final_logit_softcapping" in values:
        config["final_logit_softcapping"] = values.number("final_logit_softcapping")
    of_full = {"head_dim": _head_size(values, ""), "num_key_value_heads": _kv_heads(values, kinds, _FULL)}
    config["per_layer_config"] = {str(layer): of_full for layer, kind in enumerate(kinds) if kind == _FULL}
    config["rope_parameters"] = _rope(values, of_full["head_dim"], config["head_dim"])
    return {**config, **_per_layer_inputs(values), **_experts(values)}


def _head_size(values: Metadata, suffix: str) -> int:
    size = values.integer(f"attention.key_length{suffix}")
    if values.integer(f"attention.value_length{suffix}", size) != size:
        raise values.error(f"has keys of {size} elements and values of another size, expected one size")
    return size


def _kv_heads(values: Metadata, kinds: list[str], kind: str) -> int:
    """Key/value heads of the layers of one kind; if there are none, of all layers."""
    stored = values.list_or_integer("attention.head_count_kv", values.integer("attention.head_count"))
    per_layer = stored if isinstance(stored, list) else [stored] * len(kinds)
    if len(per_layer) != len(kinds):
        raise values.error(f"has {len(per_layer)} numbers of key/value heads, expected one for each of {len(kinds)}")
    found = {heads for heads, of in zip(per_layer, kinds, strict=True) if of == kind} or set(per_layer)
    if len(found) != 1 or (heads := found.pop()) < 1:
        raise values.error(f"has {stored} as 'gemma4.attention.head_count_kv', expected one number for {kind}")
    return int(heads)


def _mlp_sizes(values: Metadata, own: int) -> tuple[bool, int]:
    """Whether the MLPs of layers that share keys and values are twice as wide, and the size of the others."""
    stored = values.list_or_integer("feed_forward_length", 0)
    if isinstance(stored, int):
        return False, values.integer("feed_forward_length")
    first = stored[0] if stored else 0
    count = num_layers(values)
    for wide in (False, True):
        if first > 0 and stored == [first] * own + [first * (1 + wide)] * (count - own):
            return wide, int(first)
    raise values.error(
        f"has {stored} as 'gemma4.feed_forward_length', expected one size for the first {own} of {count} layers, and "
        "the same or twice that for the others"
    )


def _keys_are_values(values: Metadata, kinds: list[str], own: int) -> bool:
    """Whether layers without a window use their keys as values: the file has no `attn_v` for them."""
    with_keys = [layer for layer in range(own) if kinds[layer] == _FULL]
    has_values = {values.has_tensor(f"blk.{layer}.attn_v.weight") for layer in with_keys}
    if len(has_values) > 1:
        raise values.error("has 'attn_v' in some layers without a sliding window, expected it in all of them or none")
    return has_values == {False}


def _rope(values: Metadata, full_size: int, window_size: int) -> dict[str, Any]:
    """`rope_parameters`: the first frequencies of layers without a window rotate."""
    for key, size in (("rope.dimension_count", full_size), ("rope.dimension_count_swa", window_size)):
        if (found := values.integer(key, size)) != size:
            raise values.error(f"has {found} as 'gemma4.{key}', expected the head size {size}")
    values.refuse_other("rope.scaling.type", "none")
    factors = values.vector(_FACTORS, full_size // 2)
    count = sum(factor == 1.0 for factor in factors)
    if not count or factors[:count] != [1.0] * count or any(factor < _STILL for factor in factors[count:]):
        raise values.error(f"has tensor {_FACTORS!r} with other factors than ones, followed by values above {_STILL}")
    part = 2 * count / full_size
    if int(part * full_size // 2) < count:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    theta = values.number("rope.freq_base", 10000.0)
    full = {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": theta}
    window = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", theta)}
    return {"full_attention": full, "sliding_attention": window}


def _per_layer_inputs(values: Metadata) -> dict[str, Any]:
    size = values.integer("embedding_length_per_layer_input", 0, at_least=0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    rows = values.tensor("per_layer_token_embd.weight").shape[0]
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": rows}


def _experts(values: Metadata) -> dict[str, Any]:
    if not values.integer("expert_count", 0, at_least=0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": num_experts(values),
        "top_k_experts": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
    }
