"""The operation `rotary_embedding` of queries and keys."""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def rotary_embedding(
    index: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first rotary_dim elements of every head by the angles of its token; the rest is unchanged.

        head    [ a₀ a₁ … | b₀ b₁ … | untouched ]        aᵢ' = aᵢ cos θᵢ - bᵢ sin θᵢ
                 rotary/2   rotary/2                     bᵢ' = bᵢ cos θᵢ + aᵢ sin θᵢ

    Args:
        index: [T], int32 or int64: each token's row of `cos_sin`.
        query: [T, num_heads, head_size], compute dtype; the last dimension is contiguous, the others may be strided.
        key: [T, num_kv_heads, head_size], likewise.
        cos_sin: [rows, rotary_dim], float32: cosines of the rotary_dim / 2 angles, then their sines.

    Returns:
        The rotated query and key; shapes and dtype as given.
    """
    cos, sin = cos_sin.index_select(0, index).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


ROTARY_EMBEDDING = OpSchema(
    rotary_embedding,
    facts={"head_size": "elements per head", "rotary_dim": "leading elements of a head that are rotated, even"},
    may_overwrite=("query", "key"),
)
