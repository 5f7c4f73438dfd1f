"""Random weights of test models."""

from __future__ import annotations

import math

import torch


def draw_weight(
    name: str, shape: torch.Size, generator: torch.Generator, *, embedding_scale: float = 0.2
) -> torch.Tensor:
    """A random weight under which attention is peaked and logits are spread; float32.

    Args:
        name: Name of the parameter in transformers' model; it decides the scale.
        embedding_scale: Standard deviation of token embeddings.
    """
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or ".ln_" in name:
        return 1 + 0.2 * noise if name.endswith("weight") else 0.05 * noise
    if name.endswith("dt_bias"):
        return 0.3 * noise - 2  # small time steps: a state keeps a token for some dozens of steps
    if len(shape) == 1:
        return 0.3 * noise
    if any(part in name for part in ("embed_positions", "wpe")):
        return 0.8 * noise
    if any(part in name for part in ("embed_tokens", "wte", "word_embeddings")):
        return embedding_scale * noise
    is_transposed = any(part in name for part in ("c_attn", "c_proj", "c_fc"))
    return noise * (1.4 / math.sqrt(shape[0 if is_transposed else 1]))
