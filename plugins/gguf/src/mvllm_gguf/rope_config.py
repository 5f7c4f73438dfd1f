"""The RoPE settings of config.json from a GGUF file's metadata and its tensors of frequency factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mvllm_gguf.metadata import Metadata

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of all published Llama 3 models except `factor`; files store only the resulting frequency factors."""

_LONG, _SHORT, _FACTORS = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


def rope_config(values: Metadata, head_dim: int, max_position: int, *, partial: bool = False) -> dict[str, Any]:
    """`rope_theta`, and if needed `rope_scaling` and `partial_rotary_factor`.

    Args:
        values: The file's metadata.
        head_dim: Elements per head.
        max_position: `max_position_embeddings`.
        partial: Whether the family supports partial rotary embeddings.

    Raises:
        ModelError: A value or tensor is missing, has the wrong type, or the scaling is not supported.
    """
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim or (rotary_dim != head_dim and not partial):
        expected = f"an even number of at most {head_dim}" if partial else f"the head size {head_dim}"
        raise values.error(f"has {rotary_dim} as '{values.architecture}.rope.dimension_count', expected {expected}")
    config: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", 10000.0)}
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _scaling(values, rotary_dim, max_position, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if "original_max_position_embeddings" in (scaling or {}) and values.architecture == "phi3":
        config["original_max_position_embeddings"] = (scaling or {}).pop("original_max_position_embeddings")
    return config


def _scaling(values: Metadata, rotary_dim: int, max_position: int, theta: float) -> dict[str, Any] | None:
    original = values.integer("rope.scaling.original_context_length", max_position)
    # Old files have no type, and the factor may have its old name.
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0))
    kind = values.text("rope.scaling.type", "linear")
    has_factors = any(map(values.has_tensor, (_LONG, _SHORT, _FACTORS)))
    if has_factors and kind in ("linear", "yarn") and factor != 1.0:
        raise values.error(f"has a tensor of RoPE factors and {kind!r} scaling by {factor}, expected one of them")
    if values.has_tensor(_LONG) or values.has_tensor(_SHORT):
        short, long = values.vector(_SHORT, rotary_dim // 2), values.vector(_LONG, rotary_dim // 2)
        return _longrope(values, short, long, max_position, original)
    values.refuse_other("rope.scaling.attn_factor", 1.0)
    if values.has_tensor(_FACTORS):
        return _from_factors(values.vector(_FACTORS, rotary_dim // 2), theta, max_position)
    if kind == "linear":
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(values, factor, original)
    if kind in ("none", "longrope"):  # LongRoPE without its tensors has no effect
        return None
    raise values.error(
        f"has {kind!r:.100} as '{values.architecture}.rope.scaling.type', "
        "expected 'none', 'linear', 'yarn' or 'longrope'"
    )


def _yarn(values: Metadata, factor: float, original: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for key, name in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"rope.scaling.{key}" in values:
            scaling[name] = values.number(f"rope.scaling.{key}")
    return scaling


def _longrope(
    values: Metadata, short: list[float], long: list[float], max_position: int, original: int
) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if "rope.scaling.attn_factor" in values:
        factor = values.number("rope.scaling.attn_factor")
        ratio = max_position / original
        usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
        if not math.isclose(factor, usual, rel_tol=1e-5):
            scaling["attention_factor"] = factor
    return scaling


def _from_factors(factors: list[float], theta: float, max_position: int) -> dict[str, Any] | None:
    """The scaling that divides each frequency by its factor: `llama3` if that gives these factors, else `longrope`."""
    found = np.array(factors)
    if np.all(found == 1.0):
        return None
    settings = {"rope_type": "llama3", "factor": factors[-1], **_LLAMA3}
    if np.allclose(_llama3_factors(len(factors), theta, factors[-1]), found, rtol=1e-4):
        return settings
    # LongRoPE has one factor per frequency. With the original context equal to the whole, short factors always apply.
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": max_position,
        "attention_factor": 1.0,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi) * theta ** (-np.arange(count) / count)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
