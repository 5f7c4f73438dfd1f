"""Attention layers for tests."""

from __future__ import annotations

import math
from typing import Any

from mvllm.platform.attention import AttentionSpec


def make_spec(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: str = "float32", **fields: Any
) -> AttentionSpec:
    """An AttentionSpec with the scale 1 / sqrt(head_size); the cache has the compute dtype by default."""
    fields.setdefault("kv_dtype", dtype)
    return AttentionSpec(num_heads, num_kv_heads, head_size, dtype, scale=1 / math.sqrt(head_size), **fields)
