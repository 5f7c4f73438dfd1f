"""Index scores and the selection of positions in plain torch: the reference of `AttentionBackend.select`.

    query [n, heads, size] ──┐
    keys  [m, size] ─────────┴─ max(0, scale · q · k) ─┐
    weights [n, heads] ────────────────────────────────┴─ sum over heads ─> scores [n, m] ─> top_k positions [n, top_k]

Source: DeepSeek-V3.2 (the lightning indexer). Its Hadamard transform of queries and keys leaves the products as they
are, and its FP8 products are a faster form of these; both are left out, as in transformers.
"""

from __future__ import annotations

import torch

_TILE_ELEMENTS = 1 << 22


def query_tile(num_heads: int, num_keys: int) -> int:
    """Number of queries whose scores of all heads take at most 16 MiB; at least 1."""
    return max(1, _TILE_ELEMENTS // max(1, num_heads * num_keys))


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """The score of each key for each query: float32 [n, m].

    Args:
        query: [n, heads, size], float32.
        weights: [n, heads], float32.
        keys: [m, size], float32.
        scale: Factor on query-key products, positive.
    """
    products = torch.matmul(query, keys.t()).mul_(scale).relu_()
    return torch.matmul(weights.unsqueeze(1), products).squeeze(1)


def best_positions(scores: torch.Tensor, begin: int, top_k: int) -> torch.Tensor:
    """The visible positions with the highest scores, of equal scores the earlier ones.

    A score and its position are one integer, so that no two are equal, and the result does not depend on how a device
    treats equal scores. They are frequent: every key whose products are all negative has the score 0.

        key of position s   [ score as an integer of the same order | m - 1 - s ]

    Args:
        scores: [n, m], float32; query i is at position begin + i and sees the positions [0, begin + i].
        begin: Position of the first query.
        top_k: Number of positions.

    Returns:
        int32 [n, min(top_k, m)], -1 at the end of a row where fewer are visible.
    """
    n, m = scores.shape
    at = torch.arange(m, device=scores.device)
    query_at = torch.arange(begin, begin + n, device=scores.device).unsqueeze(1)
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers: more bits are less
    keys = (ordered.long() << 32) + (m - 1 - at)
    keys = keys.masked_fill(at > query_at, torch.iinfo(torch.int64).min)
    best = torch.topk(keys, min(top_k, m), dim=-1)
    hidden = best.values == torch.iinfo(torch.int64).min
    return best.indices.masked_fill(hidden, -1).int()
