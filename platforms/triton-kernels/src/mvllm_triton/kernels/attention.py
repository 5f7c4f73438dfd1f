"""Kernels of paged attention, for any number of query tokens per request.

The idea: the rows of a program's tile are the query heads that share a key/value head, for some tokens of one request.
The program reads that request's keys once for all rows.

    rows of a tile   token 0: head 0, 1, .. HEADS - 1 | token 1: head 0, .. | ..    BLOCK_Q tokens, BLOCK_M rows

A request is *short* if one tile of the short launch holds all its tokens: a decode, with or without draft tokens. A
batch with both kinds of requests takes both launches; each skips the requests of the other.

The grids depend on shapes only, so a captured launch can be replayed with other lengths. The programs divide the work
on the device, in tiles of BLOCK_N keys (kernels/attention_work.py):

    short launch     all tiles of keys of all requests in one row, of which each program takes an equal share

        tiles of keys   | request 0           | request 1 | request 2 | request 3              |
        programs        | program 0    | program 1    | program 2    | program 3    | program 4 |

    long launch      one program per tile of queries; if these are few or one has most of the keys, several programs,
                     each with a part of the keys

A program stores the result of a tile of queries if it has all its keys, and partial sums otherwise;
`paged_attention_reduce` reduces these to one result. Padding tokens get zeros.

The loop over tiles of keys loads the block numbers of the next tile. So the addresses of keys and values are known one
iteration ahead, and the compiler can copy them to shared memory while the previous tiles are multiplied.

Scores are in units of log2(e), because the hardware computes exp2.

Sources: FlashAttention, arXiv:2205.14135; split keys: Flash-Decoding (Dao et al., 2023); equal shares of a row of work:
Stream-K, arXiv:2301.03598.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mvllm_triton.kernels.attention_work import (
    EQUAL,
    first_work,
    key_range,
    long_request,
    long_share,
    programs_until,
    request_lengths,
    short_division,
    short_request,
    short_share,
    short_tiles,
)
from mvllm_triton.kernels.numbers import tanh, widen

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # maximum over no scores: finite, so that the difference of two is not NaN


@triton.jit
def load_block_ids(table_row, at, column, first, end, BLOCK_SIZE: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Block numbers of the keys at `at + column`; 0 for keys outside [first, end), whose entries are undefined."""
    if ONE_BLOCK:
        block = tl.load(table_row + at // BLOCK_SIZE, mask=at < end, other=0)
    else:
        key_at = at + column
        block = tl.load(table_row + key_at // BLOCK_SIZE, mask=(key_at >= first) & (key_at < end), other=0)
    return block


@triton.jit
def attention_inner(
    best,  # [BLOCK_M] largest score; like the next two from the keys before
    total,  # [BLOCK_M] sum of weights
    summed,  # [BLOCK_M, VALUE_PAD] sum of weighted values
    q,  # [BLOCK_M, HEAD_PAD]
    q_rest,  # [BLOCK_M, REST_PAD] with LATENT
    position,  # [BLOCK_M] of each row's token
    last,  # [BLOCK_M] last position that it sees: its own, or the last one of its span
    score_scale,
    keys,  # pointers to the first element of the head; likewise below
    values,
    key_scales,
    value_scales,
    table_row,
    first,  # keys [first, end) exist
    end,
    at,  # first key of the first tile: a multiple of BLOCK_N
    count,  # tiles
    before_gap,  # tiles before a gap of `gap` keys
    gap,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    key_scale_block_stride,
    key_scale_slot_stride,
    value_scale_block_stride,
    value_scale_slot_stride,
    MASKED: tl.constexpr,  # some row must not see some key of the tiles
    GAP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    REST_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    LATENT: tl.constexpr,
    SCALES: tl.constexpr,
    FP8: tl.constexpr,
):
    """Adds tiles of keys to the sums of a tile of queries."""
    DTYPE: tl.constexpr = q.dtype
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_PAD)
    rest_dim = tl.arange(0, REST_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    if GAP:
        at += tl.where(before_gap > 0, 0, gap)
    block = load_block_ids(table_row, at, column, first, end, BLOCK_SIZE, ONE_BLOCK)
    for index in tl.range(0, count):
        next_at = at + BLOCK_N
        if GAP:
            next_at += tl.where(index + 1 == before_gap, gap, 0)
        # The next tile's entries may not exist: past the last key this reads nothing.
        next_block = load_block_ids(table_row, next_at, column, first, end, BLOCK_SIZE, ONE_BLOCK)
        key_at = at + column
        slot = key_at % BLOCK_SIZE
        wide_block = block.to(tl.int64)
        is_key = (key_at >= first) & (key_at < end)
        # Values outside are not numbers if their slots were used before, and a weight of zero does not erase them.
        key_row = keys + wide_block * key_block_stride + slot * key_slot_stride
        k_mask = (dim < HEAD_SIZE)[None, :]
        if LATENT and MASKED:
            k_mask = k_mask & is_key[:, None]
        if LATENT:
            v = widen(tl.load(key_row[:, None] + dim[None, :], mask=k_mask, other=0.0), DTYPE, FP8)
            rest_mask = (rest_dim < REST_SIZE)[None, :]
            k_rest = tl.load(key_row[:, None] + HEAD_SIZE + rest_dim[None, :], mask=rest_mask, other=0.0)
            scores = tl.dot(q, tl.trans(v), input_precision="ieee")
            scores = tl.dot(q_rest, tl.trans(widen(k_rest, DTYPE, FP8)), scores, input_precision="ieee")
        else:
            k = widen(tl.load(key_row[:, None] + dim[None, :], mask=k_mask, other=0.0), DTYPE, FP8)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SCALES == 2:
            scale_row = key_scales + wide_block * key_scale_block_stride + slot * key_scale_slot_stride
            key_scale = tl.load(scale_row, mask=is_key, other=0.0)
            scores = scores * (score_scale * key_scale)[None, :]
        elif SOFT_CAP > 0.0:
            scores = scores * score_scale
        if SOFT_CAP > 0.0:
            scores = tanh(scores / SOFT_CAP) * (SOFT_CAP * LOG2_E)
        if MASKED:
            is_seen = (key_at[None, :] <= last[:, None]) & is_key[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (key_at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, -float("inf"))

        # Scores that are only scaled are scaled here, in one operation with the difference: the scale is positive.
        FACTORED: tl.constexpr = not (SCALES == 2 or SOFT_CAP > 0.0)
        row_best = tl.max(scores, 1)
        if FACTORED:
            row_best = row_best * score_scale
        new_best = tl.maximum(best, row_best)
        if FACTORED:
            weights = tl.exp2(scores * score_scale - new_best[:, None])
        else:
            weights = tl.exp2(scores - new_best[:, None])
        faded = tl.exp2(best - new_best)
        total = total * faded + tl.sum(weights, 1)
        summed = summed * faded[:, None]
        best = new_best

        if not LATENT:
            value_row = values + wide_block * value_block_stride + slot * value_slot_stride
            v_mask = (value_dim < VALUE_SIZE)[None, :]
            if MASKED:
                v_mask = v_mask & is_key[:, None]
            v = widen(tl.load(value_row[:, None] + value_dim[None, :], mask=v_mask, other=0.0), DTYPE, FP8)
        if SCALES == 2:
            if LATENT:
                value_scale = key_scale
            else:
                value_scale = tl.load(
                    value_scales + wide_block * value_scale_block_stride + slot * value_scale_slot_stride,
                    mask=is_key,
                    other=0.0,
                )
            # A small weight times a small scale may underflow in float16.
            if q.dtype == tl.float16:
                v = (v.to(tl.float32) * value_scale[:, None]).to(DTYPE)
            else:
                weights = weights * value_scale[None, :]
        summed = tl.dot(weights.to(DTYPE), v, summed, input_precision="ieee")
        at = next_at
        block = next_block
    return best, total, summed


@triton.jit
def store_zeros(
    out,
    first_token,
    step,
    num_tokens,
    out_token_stride,
    out_head_stride,
    kv_head,
    head_tile,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Stores zeros for every `step`-th token from `first_token` on, for the heads of a tile."""
    HEADS_PAD: tl.constexpr = triton.next_power_of_2(HEADS)
    index = tl.arange(0, HEADS_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    group_head = head_tile * HEADS + index
    mask = ((index < HEADS) & (group_head < GROUP))[:, None] & (value_dim < VALUE_SIZE)[None, :]
    zeros = tl.zeros([HEADS_PAD, VALUE_PAD], dtype=out.dtype.element_ty)
    place = out + (kv_head * GROUP + group_head)[:, None] * out_head_stride + value_dim[None, :]
    for token in range(first_token, num_tokens, step):
        tl.store(place + tl.cast(token, tl.int64) * out_token_stride, zeros, mask=mask)


# Not specialized, because they differ from step to step: numbers, and the alignment of tables in a step's buffer.
_BY_STEP = [
    *("block_table", "query_start_loc", "seq_lens", "visible_lens", "table_stride"),
    *("num_requests", "num_tokens", "num_programs"),
]


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    kind = "mla" if specialization.constants["LATENT"] else "paged_attention"
    return f"{kind}_decode" if specialization.constants["SHORT"] else f"{kind}_prefill"


@triton.jit(repr=_kernel_name, do_not_specialize=[*_BY_STEP, "least"])
def paged_attention(
    out,  # [T, heads, VALUE_SIZE]
    partial,  # [partials, tiles of heads, BLOCK_M, VALUE_SIZE] float32: partial sums, with SPLIT
    partial_max,  # [partials, tiles of heads, BLOCK_M] float32
    partial_sum,
    query,  # [T, heads, HEAD_SIZE + REST_SIZE]
    keys,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE + REST_SIZE]
    values,  # [num_blocks, BLOCK_SIZE, kv_heads, VALUE_SIZE]; unused with LATENT
    key_scales,  # float32: [1], or [num_blocks, BLOCK_SIZE, kv_heads]
    value_scales,
    sinks,  # [heads]
    block_table,  # [R, P]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    visible_lens,  # [T] how many leading positions each token sees; unused without SPANS
    num_requests,
    num_tokens,
    num_programs,  # among which the work is divided
    least,  # tiles of keys that a program takes at least
    scale,  # positive
    value_factor,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    key_scale_block_stride,
    key_scale_slot_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_slot_stride,
    value_scale_head_stride,
    table_stride,
    out_token_stride,
    out_head_stride,
    SHORT: tl.constexpr,  # the short launch
    PADDING: tl.constexpr,  # whether this launch stores zeros for padding tokens
    SKIPPED: tl.constexpr,  # long launch: skip requests of up to this many tokens, which the short launch takes; or 0
    GROUP: tl.constexpr,  # query heads of a key/value head
    HEADS: tl.constexpr,  # how many of these are in a tile
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # rounded up to a power of two; likewise below
    REST_SIZE: tl.constexpr,  # LATENT: elements of a key after its value
    REST_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # whether keys of one tile of queries may be divided among programs
    WINDOW: tl.constexpr,  # 0 for none
    SOFT_CAP: tl.constexpr,  # 0 for none
    SINKS: tl.constexpr,
    LATENT: tl.constexpr,
    SCALES: tl.constexpr,  # 0: none, 1: one for all, 2: for each token and head
    FP8: tl.constexpr,  # see `numbers.widen`
    SPANS: tl.constexpr = False,  # tokens of a span see positions after their own
):
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_PAD)
    rest_dim = tl.arange(0, REST_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    group_head = head_tile * HEADS + row % HEADS
    head = kv_head * GROUP + group_head
    is_head = (row < BLOCK_Q * HEADS) & (group_head < GROUP)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    score_scale = scale
    if SCALES == 1:
        score_scale = score_scale * tl.load(key_scales)
        value_factor = value_factor * tl.load(value_scales)
    if SCALES == 2:
        key_scales += kv_head * key_scale_head_stride
        value_scales += kv_head * value_scale_head_stride
    if SOFT_CAP == 0.0:
        score_scale = score_scale * LOG2_E

    # The program's work: tiles [work, stop) of a row of tiles. A long launch's program has one piece of work.
    if SHORT:
        work, stop, request, begin = short_share(
            query_start_loc, seq_lens, num_requests, program, num_programs, least, BLOCK_Q, BLOCK_N, WINDOW
        )
        spare, num_spare = program, tl.num_programs(0)
        tile, split, num_splits, partial_index = 0, 0, 1, 0
    else:
        share = long_share(
            query_start_loc, seq_lens, num_requests, num_programs, least, SKIPPED, BLOCK_Q, BLOCK_N, WINDOW, SPLIT
        )
        request, tile, split, num_splits, partial_index, num_pieces = long_request(
            query_start_loc, seq_lens, num_requests, share, program, SKIPPED, BLOCK_Q, BLOCK_N, WINDOW, SPLIT
        )
        work = program
        stop = tl.minimum(program + 1, num_pieces)
        begin = 0
        spare, num_spare = program - num_pieces, tl.num_programs(0) - num_pieces

    while work < stop:
        start, length, seq_len = request_lengths(query_start_loc, seq_lens, request)
        first_token = start + tile * BLOCK_Q
        first_position = seq_len - length + tile * BLOCK_Q
        first, end = key_range(first_position, seq_len, BLOCK_Q, WINDOW)
        if SPANS and not SHORT:  # a short request's tile ends with its sequence
            tile_token = first_token + row // HEADS
            seen = tl.load(visible_lens + tile_token, mask=is_head & (tile_token < start + length), other=0)
            end = tl.maximum(end, tl.max(seen, 0))
        first_tile = first // BLOCK_N
        end_tile = tl.maximum(tl.cdiv(end, BLOCK_N), first_tile)
        if SHORT:
            num_tiles = short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW)
            low = first_tile + work - begin
            high = first_tile + tl.minimum(num_tiles, stop - begin)
            is_whole = (work == begin) & (begin + num_tiles <= stop)
            # A request that began in an earlier program ends here or covers the whole share: one of these per program,
            # and one that begins here and continues.
            partial_index = 2 * program + (work == begin).to(tl.int32)
            is_piece = num_tiles > 0
        else:
            per_split = tl.cdiv(end_tile - first_tile, num_splits)
            low = tl.minimum(first_tile + split * per_split, end_tile)
            high = tl.minimum(low + per_split, end_tile)
            is_whole = num_splits == 1
            is_piece = True
        if is_piece:
            token = first_token + row // HEADS
            is_row = is_head & (token < start + length)
            position = first_position + row // HEADS
            last = position
            if SPANS:
                last = tl.load(visible_lens + token, mask=is_row, other=0) - 1
            query_row = query + token.to(tl.int64)[:, None] * query_token_stride + head[:, None] * query_head_stride
            q = tl.load(query_row + dim[None, :], mask=is_row[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
            q_rest = q
            if LATENT:
                rest_mask = is_row[:, None] & (rest_dim < REST_SIZE)[None, :]
                q_rest = tl.load(query_row + HEAD_SIZE + rest_dim[None, :], mask=rest_mask, other=0.0)
            best = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            if SINKS:
                sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                best = tl.where(is_whole, sink, best)
                total = tl.where(is_whole, 1.0, total)
            summed = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
            table_row = block_table + request.to(tl.int64) * table_stride

            # A long tile has tiles of keys that every row sees, [plain, masked), and others before and after these.
            if not SHORT:
                plain = low
                if WINDOW > 0:
                    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
                    plain = tl.maximum(plain, tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N))
                plain = tl.minimum(plain, high)
                masked = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, high), plain)
                best, total, summed = attention_inner(
                    best, total, summed, q, q_rest, position, last, score_scale, keys, values, key_scales, value_scales,
                    table_row, first, end, plain * BLOCK_N, masked - plain, 0, 0,
                    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, key_scale_block_stride,
                    key_scale_slot_stride, value_scale_block_stride, value_scale_slot_stride, False, False,
                    HEAD_SIZE, HEAD_PAD, REST_SIZE, REST_PAD, VALUE_SIZE, VALUE_PAD, BLOCK_SIZE, BLOCK_N, WINDOW,
                    SOFT_CAP, LATENT, SCALES, FP8,
                )  # fmt: skip
                before_gap = plain - low
                gap = (masked - plain) * BLOCK_N
                count = high - low - (masked - plain)
            else:
                before_gap, gap, count = 0, 0, high - low
            GAP: tl.constexpr = not SHORT
            best, total, summed = attention_inner(
                best, total, summed, q, q_rest, position, last, score_scale, keys, values, key_scales, value_scales,
                table_row, first, end, low * BLOCK_N, count, before_gap, gap,
                key_block_stride, key_slot_stride, value_block_stride, value_slot_stride, key_scale_block_stride,
                key_scale_slot_stride, value_scale_block_stride, value_scale_slot_stride, True, GAP,
                HEAD_SIZE, HEAD_PAD, REST_SIZE, REST_PAD, VALUE_SIZE, VALUE_PAD, BLOCK_SIZE, BLOCK_N, WINDOW,
                SOFT_CAP, LATENT, SCALES, FP8,
            )  # fmt: skip

            summed = summed * value_factor
            out_mask = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
            if SPLIT and not is_whole:
                part = (tl.cast(partial_index, tl.int64) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M + row
                tl.store(partial_max + part, best, mask=is_row)
                tl.store(partial_sum + part, total, mask=is_row)
                tl.store(partial + part[:, None] * VALUE_SIZE + value_dim[None, :], summed, mask=out_mask)
            else:
                summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]
                place = out + token.to(tl.int64)[:, None] * out_token_stride + head[:, None] * out_head_stride
                tl.store(place + value_dim[None, :], summed.to(out.dtype.element_ty), mask=out_mask)
        if SHORT:
            begin += num_tiles
            work = tl.maximum(work, begin)
            request += 1
        else:
            work += 1

    if PADDING and spare >= 0:
        first_padding = tl.load(query_start_loc + num_requests) + spare
        store_zeros(
            out, first_padding, num_spare, num_tokens, out_token_stride, out_head_stride, kv_head, head_tile, GROUP,
            HEADS, VALUE_SIZE, VALUE_PAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["query_start_loc", "seq_lens", "num_requests", "num_programs", "least"])
def paged_attention_reduce(
    out,  # [T, heads, VALUE_SIZE]
    partial,  # [partials, tiles of heads, BLOCK_M, VALUE_SIZE] float32
    partial_max,  # [partials, tiles of heads, BLOCK_M] float32
    partial_sum,
    sinks,
    query_start_loc,
    seq_lens,
    num_requests,
    num_programs,
    least,
    out_token_stride,
    out_head_stride,
    SHORT: tl.constexpr,
    SKIPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    PIECES: tl.constexpr,  # partial results of a row per iteration
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Reduces the partial sums of some rows of a tile of queries to one result.

    In a short launch program i has the request that programs i and i + 1 share first, if there is one: each such
    request has one program. In a long launch it has the i-th tile of queries with several programs.
    """
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    if SHORT:
        all_tiles, used, kind = short_division(
            query_start_loc, seq_lens, num_requests, num_programs, least, BLOCK_Q, BLOCK_N, WINDOW
        )
        if (kind != EQUAL) | (program + 1 >= used):
            return
        boundary = first_work(program + 1, all_tiles, used)
        request, begin = short_request(query_start_loc, seq_lens, num_requests, boundary, BLOCK_Q, BLOCK_N, WINDOW)
        if (begin >= boundary) | (begin < first_work(program, all_tiles, used)):
            return
        start, length, seq_len = request_lengths(query_start_loc, seq_lens, request)
        end = begin + short_tiles(length, seq_len, BLOCK_Q, BLOCK_N, WINDOW)
        first_partial = 2 * program
        num_pieces = programs_until(end, all_tiles, used) - program
        tile = 0
    else:
        share = long_share(
            query_start_loc, seq_lens, num_requests, num_programs, least, SKIPPED, BLOCK_Q, BLOCK_N, WINDOW, True
        )
        request, tile, _, num_pieces, first_partial, num_split = long_request(
            query_start_loc, seq_lens, num_requests, share, program, SKIPPED, BLOCK_Q, BLOCK_N, WINDOW, True, True
        )
        if program >= num_split:
            return
        start, length, seq_len = request_lengths(query_start_loc, seq_lens, request)

    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token = start + tile * BLOCK_Q + row // HEADS
    group_head = head_tile * HEADS + row % HEADS
    head = kv_head * GROUP + group_head
    is_row = (row < BLOCK_Q * HEADS) & (group_head < GROUP) & (token < start + length)
    if tl.program_id(2) * ROWS // HEADS + tile * BLOCK_Q >= length:
        return
    piece = tl.arange(0, PIECES)
    dim = tl.arange(0, VALUE_PAD)
    best = tl.full([ROWS], LOWEST, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if SINKS:
        best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    summed = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    for at in range(0, num_pieces, PIECES):
        index = at + piece
        if SHORT:
            partial_index = first_partial + 2 * index + (index == 0).to(tl.int32)
        else:
            partial_index = first_partial + index
        place = (partial_index.to(tl.int64)[None, :] * tl.num_programs(1) + tl.program_id(1)) * BLOCK_M + row[:, None]
        mask = is_row[:, None] & (index < num_pieces)[None, :]
        sums = tl.load(partial_sum + place, mask=mask, other=0.0)
        tops = tl.load(partial_max + place, mask=mask, other=LOWEST)
        new_best = tl.maximum(best, tl.max(tops, 1))
        faded = tl.exp2(best - new_best)
        weights = tl.exp2(tops - new_best[:, None])
        total = total * faded + tl.sum(sums * weights, 1)
        parts_mask = (sums > 0.0)[:, :, None] & (dim < VALUE_SIZE)[None, None, :]
        parts = tl.load(partial + place[:, :, None] * VALUE_SIZE + dim[None, None, :], mask=parts_mask, other=0.0)
        summed = summed * faded[:, None] + tl.sum(parts * weights[:, :, None], 1)
        best = new_best
    summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + token.to(tl.int64)[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(target, summed.to(out.dtype.element_ty), mask=is_row[:, None] & (dim < VALUE_SIZE)[None, :])
