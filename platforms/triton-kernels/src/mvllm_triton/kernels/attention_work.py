"""How the programs of attention divide a step's work: device functions that compute it from the tables of the step.

All programs of a launch compute the same division, from `query_start_loc` and `seq_lens`, REQUESTS requests at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

REQUESTS = tl.constexpr(256)
EQUAL, WHOLE, BY_REQUEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of division of a short launch."""


@triton.jit
def key_range(first_position, seq_len, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr):
    """Keys [first, end) that some token of a tile of queries attends to; the tile begins at `first_position`."""
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    first = first_position * 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0)
    return first, end


@triton.jit
def request_lengths(query_start_loc, seq_lens, request):
    """The first token of a request, its tokens in this step, and the length of its sequence."""
    start = tl.load(query_start_loc + request)
    length = tl.load(query_start_loc + request + 1) - start
    return start, length, tl.load(seq_lens + request)


@triton.jit
def _lengths_of(query_start_loc, seq_lens, request, num_requests):
    """Tokens in this step and lengths of sequences of several requests; zeros for those that do not exist."""
    is_request = request < num_requests
    start = tl.load(query_start_loc + request, mask=is_request, other=0)
    stop = tl.load(query_start_loc + request + 1, mask=is_request, other=0)
    return stop - start, tl.load(seq_lens + request, mask=is_request, other=0)


@triton.jit
def short_tiles(length, seq_len, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles of keys of a short request; 0 for other requests."""
    first, end = key_range(seq_len - length, seq_len, BLOCK_Q, WINDOW)
    tiles = tl.maximum((end + BLOCK_N - 1) // BLOCK_N - first // BLOCK_N, 1)
    return tl.where((length > 0) & (length <= BLOCK_Q), tiles, 0)


@triton.jit
def short_division(
    query_start_loc,
    seq_lens,
    num_requests,
    num_programs,
    least,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """How the programs of a short launch share its tiles of keys.

    Partial sums cost time, so a request is not divided where the programs have about equal shares without it.

    Returns:
        The tiles of keys of all requests; the programs that take them, at least `least` tiles each; the kind of
        division: EQUAL for equal shares, WHOLE for shares that end with the request that is nearest, and BY_REQUEST
        for a program per request.
    """
    total = 0
    most = 0
    for at in range(0, num_requests, REQUESTS):
        request = at + tl.arange(0, REQUESTS)
        length, seq_len = _lengths_of(query_start_loc, seq_lens, request, num_requests)
        tiles = short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW)
        total += tl.sum(tiles, 0)
        most = tl.maximum(most, tl.max(tiles, 0))
    used = tl.maximum(tl.minimum(num_programs, total // least), 1)
    # In relation to a share of total / used tiles, the largest program has at most 4/3 of it with WHOLE, and 1.3 of it
    # with BY_REQUEST.
    kind = tl.where(tl.cast(most, tl.int64) * 3 * used <= total, WHOLE, EQUAL)
    alone = (num_requests <= num_programs) & (tl.cast(most, tl.int64) * 10 * used <= tl.cast(total, tl.int64) * 13)
    return total, used, tl.where(alone, BY_REQUEST, kind)


@triton.jit
def first_work(program, total, used):
    """The first of `total` tiles that a program takes, if `used` programs share them; `total` for other programs."""
    return tl.minimum(tl.cast(program, tl.int64) * total // used, total).to(tl.int32)


@triton.jit
def short_request(
    query_start_loc, seq_lens, num_requests, work, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """The request with the `work`-th tile of all tiles in a row, and the number of tiles before the request."""
    found = 0
    begin = 0
    reached = 0
    for at in range(0, num_requests, REQUESTS):
        request = at + tl.arange(0, REQUESTS)
        length, seq_len = _lengths_of(query_start_loc, seq_lens, request, num_requests)
        ends = reached + tl.cumsum(short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW), 0)
        is_before = (ends <= work) & (request < num_requests)
        found += tl.sum(is_before.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, ends, 0), 0))
        reached = tl.max(ends, 0)
    return found, begin


@triton.jit
def whole_work(
    query_start_loc,
    seq_lens,
    num_requests,
    program,
    total,
    used,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """As `first_work`, moved to the nearest boundary of two requests; and the request that begins there."""
    work = first_work(program, total, used)
    request, begin = short_request(query_start_loc, seq_lens, num_requests, work, BLOCK_Q, BLOCK_N, WINDOW)
    length, seq_len = _lengths_of(query_start_loc, seq_lens, request, num_requests)
    end = tl.where(request < num_requests, begin + short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW), begin)
    is_before = work - begin <= end - work
    return tl.where(is_before, begin, end), tl.where(is_before, request, request + 1)


@triton.jit
def programs_until(work, total, used):
    """Number of programs that take the first `work` tiles, the last one maybe with some more."""
    return ((tl.cast(work, tl.int64) * used + total - 1) // total).to(tl.int32)


@triton.jit
def short_share(
    query_start_loc,
    seq_lens,
    num_requests,
    program,
    num_programs,
    least,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Tiles [work, stop) of a program of a short launch, the request of the first one, and the tiles before it."""
    total, used, kind = short_division(
        query_start_loc, seq_lens, num_requests, num_programs, least, BLOCK_Q, BLOCK_N, WINDOW
    )
    work = total * 0
    stop = work
    begin = work
    request = tl.minimum(program, num_requests - 1)
    if kind == BY_REQUEST:
        _, length, seq_len = request_lengths(query_start_loc, seq_lens, request)
        stop = tl.where(program < num_requests, short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW), 0)
    elif kind == WHOLE:
        work, request = whole_work(
            query_start_loc, seq_lens, num_requests, program, total, used, BLOCK_Q, BLOCK_N, WINDOW
        )
        begin = work
        stop, _ = whole_work(
            query_start_loc, seq_lens, num_requests, program + 1, total, used, BLOCK_Q, BLOCK_N, WINDOW
        )
    else:
        work = first_work(program, total, used)
        stop = first_work(program + 1, total, used)
        request, begin = short_request(query_start_loc, seq_lens, num_requests, work, BLOCK_Q, BLOCK_N, WINDOW)
    return work, stop, request, begin


@triton.jit
def _long_tiles(length, SKIPPED: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Tiles of queries of a request; 0 for requests of the short launch."""
    return tl.where(length > SKIPPED, (length + BLOCK_Q - 1) // BLOCK_Q, 0)


@triton.jit
def _most_keys(seq_len, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Upper bound of the tiles of keys of each tile of queries."""
    most = (seq_len + BLOCK_N - 1) // BLOCK_N
    if WINDOW > 0:
        most = tl.minimum(most, (WINDOW + BLOCK_Q + BLOCK_N - 2) // BLOCK_N + 1)
    return most


@triton.jit
def long_share(
    query_start_loc,
    seq_lens,
    num_requests,
    num_programs,
    least,
    SKIPPED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Tiles of keys from which on a tile of queries of a long launch is divided among several programs."""
    share = least
    if SPLIT:
        total = tl.cast(0, tl.int64)
        for at in range(0, num_requests, REQUESTS):
            request = at + tl.arange(0, REQUESTS)
            length, seq_len = _lengths_of(query_start_loc, seq_lens, request, num_requests)
            tiles = _long_tiles(length, SKIPPED, BLOCK_Q).to(tl.int64)
            total += tl.sum(tiles * _most_keys(seq_len, BLOCK_Q, BLOCK_N, WINDOW), 0)
        share = tl.maximum(((total + num_programs - 1) // num_programs).to(tl.int32), least)
    return share


@triton.jit
def long_request(
    query_start_loc,
    seq_lens,
    num_requests,
    share,
    index,
    SKIPPED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    DIVIDED: tl.constexpr = False,
):
    """The `index`-th piece of work of a long launch; with DIVIDED the `index`-th divided tile of queries.

    Returns:
        The request; its tile of queries, the one with most keys first; which part of the tile's keys, the number of
        parts; the index of the part's partial sums, with DIVIDED that of the first part's; the number of pieces or,
        with DIVIDED, of divided tiles.
    """
    found = 0
    begin = 0
    reached = 0
    num_partials = 0
    for at in range(0, num_requests, REQUESTS):
        request = at + tl.arange(0, REQUESTS)
        length, seq_len = _lengths_of(query_start_loc, seq_lens, request, num_requests)
        tiles = _long_tiles(length, SKIPPED, BLOCK_Q)
        pieces = tiles
        taken = tiles * 0
        if SPLIT:
            parts = tl.maximum((_most_keys(seq_len, BLOCK_Q, BLOCK_N, WINDOW) + share - 1) // share, 1)
            taken = tl.where(parts > 1, tiles * parts, 0)
            if DIVIDED:
                pieces = tl.where(parts > 1, tiles, 0)
            else:
                pieces = tiles * parts
        ends = reached + tl.cumsum(pieces, 0)
        is_before = (ends <= index) & (request < num_requests)
        found += tl.sum(is_before.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, ends, 0), 0))
        num_partials += tl.sum(tl.where(is_before, taken, 0), 0)
        reached = tl.max(ends, 0)
    found = tl.minimum(found, num_requests - 1)
    length, seq_len = _lengths_of(query_start_loc, seq_lens, found, num_requests)
    num_parts = 1
    if SPLIT:
        num_parts = tl.maximum((_most_keys(seq_len, BLOCK_Q, BLOCK_N, WINDOW) + share - 1) // share, 1)
    tile = index - begin
    part = 0
    if not DIVIDED:
        part = tile % num_parts
        tile = tile // num_parts
    partial_index = num_partials + tile * num_parts + part
    tile = tl.maximum(_long_tiles(length, SKIPPED, BLOCK_Q) - 1 - tile, 0)
    return found, tile, part, num_parts, partial_index, reached
