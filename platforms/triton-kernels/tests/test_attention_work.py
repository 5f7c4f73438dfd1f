"""Division of attention among programs: the device functions, on Triton's interpreter, against a list of all tiles."""

from __future__ import annotations

import functools
import importlib
import itertools

import pytest

importlib.import_module("platforms.triton-kernels.tests.interpreted")
division = importlib.import_module("platforms.triton-kernels.tests.attention_division")
tiles = importlib.import_module("mvllm_triton.tiles")

more = functools.partial(pytest.param, marks=pytest.mark.exhaustive)

H100 = 132  # multiprocessors
HEADS = 8  # key/value heads of Llama 3.1 8B, which has 4 query heads for each


def decode_shares(lengths, window=None):
    """Tiles of keys of each program of a decode on an H100, and of how many programs each request has tiles."""
    found = tiles.attention_tiles(128, 16, 2, 4, 1, shared_memory=227 << 10)
    most = -(-max(lengths) // found.columns)
    work = tiles.short_work(len(lengths), HEADS, most, H100, found.rows * 128 * 4)
    shares = division.short_shares([1] * len(lengths), lengths, work, found, window)
    programs = [0] * len(lengths)
    for share in shares:
        for request, low, high in share:
            programs[request] += high > low
    return [sum(high - low for _, low, high in share) for share in shares], programs, found


@pytest.mark.parametrize(
    "lengths",
    [
        *([1024] * batch for batch in (17, 64)),
        *(more([length] * batch) for batch, length in itertools.product((1, 16, 17, 33, 64, 300), (1000, 8192))),
        [100_000] + [1000] * 63,
        more([1000] * 63 + [100_000]),
        more([100_000] + [200] * 16),
        more([17 * (i + 1) for i in range(64)]),
    ],
    ids=lambda lengths: f"{len(lengths)} from {lengths[0]} to {lengths[-1]}",
)
def test_programs_of_a_decode_have_equal_shares(lengths):
    shares, programs, found = decode_shares(lengths)
    expected = [-(-length // found.columns) for length in lengths]
    assert sum(shares) == sum(expected)
    assert max(shares) <= 1.5 * sum(shares) / len(shares)
    if sum(expected) * HEADS >= 2 * 4 * H100:
        assert len(shares) * HEADS >= 4 * H100
    longest = max(range(len(lengths)), key=lambda r: expected[r])
    # A request has the programs that its part of the work deserves.
    assert programs[longest] >= int(expected[longest] / sum(expected) * len(shares))


@pytest.mark.exhaustive
def test_a_decode_takes_the_keys_in_its_window_only():
    shares, _, found = decode_shares([100_000] * 64, window=1024)
    assert 64 * 1024 / found.columns <= sum(shares) <= 64 * (1024 / found.columns + 1)
    assert max(shares) <= 1.5 * sum(shares) / len(shares)


def test_every_tile_belongs_to_one_program():
    """Also with requests of another launch, requests without tokens, and more requests than a block of the scan."""
    lengths = [1, 0, 9, 1, 300, 2] * 60
    seq_lens = [70, 0, 500, 1, 300, 64] * 60
    found = tiles.attention_tiles(128, 16, 2, 4, 1)
    for programs in (1, 7, 50):
        work = tiles.AttentionWork(programs, programs, 1, 0, 0)
        shares = division.short_shares(lengths, seq_lens, work, found)
        pieces = [(request, tile) for share in shares for request, low, high in share for tile in range(low, high)]
        assert pieces == [
            (request, tile)
            for request, (length, seq_len) in enumerate(zip(lengths, seq_lens))
            if 0 < length <= found.tokens
            for tile in range(-(-seq_len // found.columns))
        ]


@pytest.mark.parametrize(
    "lengths, before",
    [
        ([4096, 64, 1], [0, 100_000, 8000]),  # a chunk of a long context together with a prompt
        ([70], [100_000]),
        more([300, 200, 500], [0, 0, 0]),
        more([16] * 300, [0] * 299 + [60_000]),
    ],
    ids=lambda numbers: f"{len(numbers)} up to {max(numbers)}",
)
def test_long_launches_divide_long_contexts(lengths, before):
    found = tiles.attention_tiles(128, 16, 2, 4, tiles.LONGEST, shared_memory=227 << 10)
    seq_lens = [a + b for a, b in zip(lengths, before)]
    most = -(-max(seq_lens) // found.columns)
    work = tiles.long_work(sum(lengths), len(lengths), found.tokens, HEADS, most, H100, found.rows * 128 * 4)
    pieces = division.long_pieces(lengths, seq_lens, work, found, skipped=4)
    parts = {}
    for request, tile, part, num_parts, index in pieces:
        parts.setdefault((request, tile), []).append((part, num_parts, index))
    assert set(parts) == {
        (request, tile)
        for request, length in enumerate(lengths)
        if length > 4
        for tile in range(-(-length // found.tokens))
    }
    assert len(pieces) < work.grid  # one more stores zeros for padding
    divided = {key: found for key, found in parts.items() if found[0][1] > 1}
    indices = [index for found in divided.values() for _, _, index in found]
    assert len(set(indices)) == len(indices) and max(indices, default=0) < max(work.num_partials, 1)
    for those in parts.values():
        assert [part for part, _, _ in those] == list(range(those[0][1]))
    # `paged_attention_reduce` finds the same tiles and indices.
    assert len(divided) <= work.divided_tiles or not work.num_partials
    if work.num_partials:
        combined = division.long_divided(lengths, seq_lens, work, found, skipped=4)
        assert {key: (those[0][1], those[0][2]) for key, those in divided.items()} == combined
    tiles_of = {key: -(-seq_lens[key[0]] // found.columns) / those[0][1] for key, those in parts.items()}
    total = sum(tiles_of[key] * len(those) for key, those in parts.items()) * HEADS
    assert max(tiles_of.values()) <= max(1.5 * total / H100, tiles.LEAST_LONG)
