"""How the kernels of attention divide work, computed with their own device functions on Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import os

import torch

importlib.import_module("platforms.triton-kernels.tests.interpreter")

os.environ["TRITON_INTERPRET"] = "1"  # read when the functions below are decorated
try:
    import triton
    import triton.language as tl

    from mvllm_triton.kernels.attention_work import (
        long_request,
        long_share,
        short_share,
        short_tiles,
    )

    @triton.jit
    def _short(
        found, query_start_loc, seq_lens, num_requests, num_programs, least,
        BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        work, stop, request, begin = short_share(
            query_start_loc, seq_lens, num_requests, program, num_programs, least, BLOCK_Q, BLOCK_N, WINDOW
        )
        place = found + program * 4
        tl.store(place, work)
        tl.store(place + 1, stop)
        tl.store(place + 2, request)
        tl.store(place + 3, begin)

    @triton.jit
    def _tiles(
        found, lengths, seq_lens, num_requests,
        REQUESTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        request = tl.arange(0, REQUESTS)
        mask = request < num_requests
        length = tl.load(lengths + request, mask=mask, other=0)
        seq_len = tl.load(seq_lens + request, mask=mask, other=0)
        tl.store(found + request, short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW), mask=mask)

    @triton.jit
    def _long(
        found, query_start_loc, seq_lens, num_requests, num_programs, least, SKIPPED: tl.constexpr,
        BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, DIVIDED: tl.constexpr,
    ):  # fmt: skip
        index = tl.program_id(0)
        share = long_share(
            query_start_loc, seq_lens, num_requests, num_programs, least, SKIPPED, BLOCK_Q, BLOCK_N, 0, SPLIT
        )
        request, tile, part, parts, partial_index, number = long_request(
            query_start_loc, seq_lens, num_requests, share, index, SKIPPED, BLOCK_Q, BLOCK_N, 0, SPLIT, DIVIDED
        )
        place = found + index * 6
        tl.store(place, request)
        tl.store(place + 1, tile)
        tl.store(place + 2, part)
        tl.store(place + 3, parts)
        tl.store(place + 4, partial_index)
        tl.store(place + 5, number)
finally:
    del os.environ["TRITON_INTERPRET"]


def _tables(lengths, seq_lens):
    starts = [0, *itertools.accumulate(lengths)]
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32), len(lengths)


def short_shares(lengths, seq_lens, work, tiles, window=None):
    """For each program of a short launch its pieces: (request, first tile of the request, end of the tiles)."""
    tables = _tables(lengths, seq_lens)
    options = {"BLOCK_Q": tiles.tokens, "BLOCK_N": tiles.columns, "WINDOW": window or 0}
    found = torch.zeros(work.grid, 4, dtype=torch.int32)
    _short[(work.grid,)](found, *tables, work.programs, work.least, **options)
    sizes = torch.zeros(len(lengths), dtype=torch.int32)
    given = torch.tensor(lengths, dtype=torch.int32)
    _tiles[(1,)](sizes, given, *tables[1:], REQUESTS=triton.next_power_of_2(len(lengths)), **options)
    shares = []
    for at, stop, request, begin in found.tolist():
        share = []
        while at < stop:
            end = min(stop, begin + int(sizes[request]))
            if end > at:
                share.append((request, at - begin, end - begin))
            begin += int(sizes[request])
            at = max(at, begin)
            request += 1
        shares.append(share)
    return shares


def _long_found(lengths, seq_lens, work, tiles, skipped, number, divided):
    found = torch.zeros(number, 6, dtype=torch.int32)
    _long[(number,)](
        found, *_tables(lengths, seq_lens), work.programs, work.least, SKIPPED=skipped, BLOCK_Q=tiles.tokens,
        BLOCK_N=tiles.columns, SPLIT=work.num_partials > 0, DIVIDED=divided,
    )  # fmt: skip
    return [tuple(row[:5]) for row in found.tolist()[: found[0, 5]]]


def long_pieces(lengths, seq_lens, work, tiles, skipped):
    """The pieces of a long launch: (request, tile of queries, part of its keys, number of parts, index of its sums)."""
    return _long_found(lengths, seq_lens, work, tiles, skipped, work.grid, False)


def long_divided(lengths, seq_lens, work, tiles, skipped):
    """The divided tiles of queries, and for each the number of parts and the index of the first one's partial sums."""
    rows = _long_found(lengths, seq_lens, work, tiles, skipped, work.divided_tiles, True)
    return {(request, tile): (parts, partial_index) for request, tile, _, parts, partial_index in rows}
