"""Tiles contain every token once, and their shapes depend only on padded sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm_tpu.tiles import cut, tile_shape

SIZES = [(16, 8), (64, 8), (16, 32), (512, 8), (4096, 8), (32, 32)]


@st.composite
def steps(draw):
    """Padded sizes, and requests that fit: new tokens and computed tokens of each."""
    num_tokens, num_requests = draw(st.sampled_from(SIZES))
    left, lengths = draw(st.integers(1, num_tokens)), []
    while left and len(lengths) < num_requests:
        length = left if len(lengths) == num_requests - 1 else draw(st.integers(1, left))
        lengths.append(length)
        left -= length
    return num_tokens, num_requests, lengths, draw(st.lists(st.integers(0, 50), min_size=len(lengths), max_size=32))


def arrays(num_requests, lengths, before):
    starts = np.zeros(num_requests + 1, dtype=np.int32)
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    starts[len(lengths) + 1 :] = sum(lengths)
    seq_lens = np.zeros(num_requests, dtype=np.int32)
    seq_lens[: len(lengths)] = np.array(lengths) + np.array(before[: len(lengths)])
    return starts, seq_lens


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_token_has_its_position_and_request_in_its_tile(step):
    num_tokens, num_requests, lengths, before = step
    starts, seq_lens = arrays(num_requests, lengths, before)
    tiles = cut(starts, seq_lens, num_tokens)
    assert tiles.shape == tile_shape(num_tokens, num_requests)
    assert tiles.place.shape == (num_tokens,) and tiles.request.shape == (tiles.shape.count,)
    token = 0
    for request, length in enumerate(lengths):
        for i in range(length):
            tile, within = divmod(int(tiles.place[token]), tiles.shape.size)
            assert tiles.request[tile] == request and within < tiles.length[tile]
            assert tiles.first_token[tile] + within == token
            assert tiles.first_position[tile] + within == before[request] + i
            token += 1
    assert (tiles.place[token:] == 0).all() and (tiles.length >= 1).all()


@pytest.mark.parametrize(("num_tokens", "num_requests"), SIZES)
def test_queries_are_at_most_about_twice_the_tokens(num_tokens, num_requests):
    shape = tile_shape(num_tokens, num_requests)
    assert shape.size * shape.count <= 2 * num_tokens + num_requests
