"""The operation `encoder_attention`: attention in both directions over packed sequences, without a KV cache.

    tokens      a a a a b b b b c c        cu_seqlens = (0, 4, 8, 10)
                [2, heads, 4, size]  [1, heads, 2, size]

Adjacent sequences of equal length are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: Sequence[int],
    scale: float,
    cu_seqlens_k: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention of every token to all tokens of its own sequence; cross-attention with `cu_seqlens_k`.

    Args:
        query: [T, num_heads, head_size], compute dtype; rows may be strided, the last dimension is contiguous.
        key, value: [K, num_kv_heads, head_size], likewise; `num_kv_heads` divides `num_heads`. K = T without
            `cu_seqlens_k`.
        cu_seqlens: Tuple of S + 1 rising integers: tokens cu_seqlens[i] to cu_seqlens[i + 1] are sequence i. Layers of
            one encoder get equal ones.
        scale: Factor on query-key products.
        cu_seqlens_k: Likewise for the keys of each sequence, none of which is empty where its queries are not; None for
            `cu_seqlens`.

    Returns:
        [T, num_heads * head_size], compute dtype; the softmax is computed in float32 or wider. Zeros where a token
        belongs to no sequence.
    """
    keys_of = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    num_tokens, num_heads, head_size = query.shape
    output = query.new_zeros(num_tokens, num_heads * head_size)
    for first, last in _equal_runs(cu_seqlens, keys_of):
        found = F.scaled_dot_product_attention(
            _batched(query, cu_seqlens, first, last, num_heads),
            _batched(key, keys_of, first, last, num_heads),
            _batched(value, keys_of, first, last, num_heads),
            scale=scale,
        )
        output[cu_seqlens[first] : cu_seqlens[last]] = found.transpose(1, 2).flatten(0, 1).flatten(1)
    return output


def _batched(tensor: torch.Tensor, starts: Sequence[int], first: int, last: int, num_heads: int) -> torch.Tensor:
    """The rows of sequences of equal length [n, num_heads, length, head_size]; each head is repeated for its group."""
    start, stop = starts[first], starts[last]
    rows = tensor[start:stop].unflatten(0, (last - first, (stop - start) // (last - first))).transpose(1, 2)
    groups = num_heads // tensor.shape[1]
    return rows if groups == 1 else rows.repeat_interleave(groups, dim=1)


def _equal_runs(starts: Sequence[int], keys_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the end of each run of adjacent sequences with equal lengths, without sequences of no token."""
    first, count = 0, len(starts) - 1
    for i in range(1, count + 1):
        length = starts[first + 1] - starts[first], keys_of[first + 1] - keys_of[first]
        if i < count and (starts[i + 1] - starts[i], keys_of[i + 1] - keys_of[i]) == length:
            continue
        if length[0]:
            yield first, i
        first = i


ENCODER_ATTENTION = OpSchema(
    encoder_attention,
    facts={
        "num_heads": "query heads",
        "num_kv_heads": "key/value heads",
        "head_size": "elements per head",
        "cross": "whether `cu_seqlens_k` is given",
    },
)
