"""A step split into chunks: each query sees exactly the keys of its chunk."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mvllm.attention.chunks import ChunkedMetadataBuilder, split_into_chunks
from mvllm.attention.reference import ReferenceAttention
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.shapes import StepKind
from tests.helpers.paged_driver import make_layout

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=4, dtype="float32", kv_dtype="float32", scale=0.5)


def test_the_example_of_the_module() -> None:
    layout = split_into_chunks(make_layout([12], [18], [[7, 2, 9, 4, 1]], 4), 8)
    assert layout.query_start_loc.tolist() == [0, 2, 10, 12] and layout.seq_lens.tolist() == [8, 8, 2]
    assert layout.block_table[:2].tolist() == [[7, 2], [9, 4]] and layout.block_table[2, 0] == 1
    assert (layout.num_requests, layout.max_query_len, layout.max_seq_len, layout.num_tokens) == (3, 8, 8, 12)
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(layout, f"{name}_device").tolist() == getattr(layout, name).tolist()


def test_steps_within_one_chunk_stay_as_they_are() -> None:
    layout = make_layout([3, 1], [3, 8], [[0], [1, 2]], 4)
    assert split_into_chunks(layout, 8) is layout


def test_decode_rows_stay_in_front_and_padding_requests_are_dropped() -> None:
    layout = make_layout([1, 1, 5, 1], [9, 17, 12, 8], [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10], [11, 12]], 4)
    layout.query_start_loc[-1] = layout.query_start_loc[-2]  # the last request is padding
    layout.seq_lens[-1] = 0
    layout = dataclasses.replace(layout, kind=StepKind.MIXED, num_decodes=2, num_tokens=7)
    found = split_into_chunks(layout, 8)
    assert found.seq_lens.tolist() == [1, 1, 8, 4] and found.query_start_loc.tolist() == [0, 1, 2, 3, 7]
    assert found.block_table[:, 0].tolist() == [2, 7, 8, 10] and found.num_decodes == 2


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5, 1, 20], [18, 3, 40]])
def test_queries_see_the_keys_of_their_chunk(query_lens: list[int]) -> None:
    """Against softmax over the keys that the definition names."""
    generator, chunk, block_size = torch.Generator().manual_seed(0), 8, 4
    seq_lens = [18, 8, 41]
    backend = ReferenceAttention(SPEC)
    kv = backend.allocate(32, block_size, torch.device("cpu"))
    order, tables = iter(np.random.default_rng(0).permutation(32).tolist()), []
    for length in seq_lens:
        tables.append([next(order) for _ in range(-(-length // block_size))])
    keys, values = (torch.randn(sum(seq_lens), 1, 4, generator=generator) for _ in range(2))
    whole = make_layout(seq_lens, seq_lens, tables, block_size)
    backend.write_kv(kv, keys, values, backend.build_metadata(whole))
    query = torch.randn(sum(query_lens), 2, 4, generator=generator)
    layout = make_layout(query_lens, seq_lens, tables, block_size)
    found = backend.forward(query, kv, ChunkedMetadataBuilder(backend, chunk).build_metadata(layout)).view(-1, 2, 4)
    token, first = 0, 0
    for count, length in zip(query_lens, seq_lens, strict=True):
        for position in range(length - count, length):
            seen = slice(first + position // chunk * chunk, first + position + 1)
            weights = torch.softmax(query[token] @ keys[seen, 0].T * SPEC.scale, dim=-1)
            torch.testing.assert_close(found[token], weights @ values[seen, 0])
            token += 1
        first += length
