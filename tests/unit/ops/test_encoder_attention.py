"""The operation `encoder_attention` compared with a formula for each sequence, and the layer that calls it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mvllm.layers.encoder_attention import PackedAttention
from mvllm.ops.encoder_attention import encoder_attention
from tests.helpers.paged_driver import make_context


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: [T, heads, size] and [K, key/value heads, size] to [T, heads * size]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("starts", [(0, 6), (0, 3, 6, 6, 9, 10), (2, 2, 7, 12, 13)])
def test_a_token_attends_to_every_token_of_its_sequence_and_to_no_other(
    starts: tuple[int, ...], num_kv_heads: int
) -> None:
    rows = starts[-1] + 2
    query, key, value = (torch.randn(rows, heads, 8).double() for heads in (4, num_kv_heads, num_kv_heads))
    found = encoder_attention(query, key, value, starts, 0.3)
    assert not found[: starts[0]].any() and not found[starts[-1] :].any()
    for start, stop in pairwise(starts):
        mine = slice(start, stop)
        torch.testing.assert_close(found[mine], dense(query[mine], key[mine], value[mine], 0.3))


def test_cross_attention_takes_the_keys_of_the_sequence_with_the_same_number() -> None:
    query, key, value = (torch.randn(rows, 2, 4).double() for rows in (7, 11, 11))
    starts, keys_of = (0, 2, 4, 4, 7), (0, 3, 6, 6, 11)
    found = encoder_attention(query, key, value, starts, 0.5, keys_of)
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(keys_of), strict=True):
        if start < stop:
            expected = dense(query[start:stop], key[first:last], value[first:last], 0.5)
            torch.testing.assert_close(found[start:stop], expected)


def test_the_layer_takes_starts_as_a_list() -> None:
    attention = PackedAttention(make_context(), 2, 8, 0.25)
    fused = torch.randn(5, 6, 8)
    query, key, value = fused.chunk(3, dim=1)
    found = attention(query, key, value, [0, 2, 5])
    torch.testing.assert_close(found, encoder_attention(query, key, value, (0, 2, 5), 0.25))
    crossed = PackedAttention(make_context(), 2, 8, 0.25, cross=True)(query, key[:3], value[:3], [0, 2, 5], [0, 1, 3])
    torch.testing.assert_close(crossed[:2], value[:1].flatten(1).expand(2, -1))
