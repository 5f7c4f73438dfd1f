"""Kernels of paged attention, for any number of query tokens per request.

The idea: the rows of a program's tile are the query heads that share a key/value head, for some tokens of one request.
The program reads that request's keys once for all rows.

    rows of a tile   token 0: head 0, 1, .. HEADS - 1 | token 1: head 0, .. | ..    BLOCK_Q tokens, BLOCK_M rows

A request is *short* if one tile of the short launch holds all its tokens: a decode, with or without draft tokens.

    short launch   tile r belongs to request r; the tiles after the last request belong to padding
    long launch    request 0: 0 1 2 | request 1: 3 | request 2: 4 5 | padding: 6  (some tiles have no tokens)

The grid of the long launch depends on shapes only, so request r begins at tile query_start_loc[r] // BLOCK_Q + r, which
leaves room for the partly filled last tile of every request. A program finds its request by bisection. A batch with
both kinds of requests takes both launches; each skips the requests of the other. Padding tokens form one more request,
of sequence length 0, whose result is zeros.

If there are few tiles, the keys of each tile are split among `num_splits` programs, which store partial sums; `combine`
reduces them to one result. Partial sums are stored by *slot*: a token in a long launch; request * BLOCK_Q plus the
token's index in the request in a short launch.

Scores are in units of log2(e), because the hardware computes exp2.

Sources: FlashAttention, arXiv:2205.14135; split keys: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import tanh, widen

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # maximum over no scores: finite, so that the difference of two is not NaN


@triton.jit
def find_request(query_start_loc, num_requests, tile, BLOCK_Q: tl.constexpr):
    """The request of a tile (`num_requests` for padding), and the index of the tile within the request."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high + 1) // 2
        reached = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low, tile - (tl.load(query_start_loc + low) // BLOCK_Q + low)


# Not specialized, because they differ from step to step: numbers, and the alignment of tables in a step's buffer.
_BY_STEP = ["block_table", "query_start_loc", "seq_lens", "table_stride", "out_split_stride"]


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_splits", "num_slots", *_BY_STEP])
def attend(
    out,  # [T, heads, VALUE_SIZE]: the result; or [num_splits, slots, heads, VALUE_SIZE]: partial sums
    out_max,  # [num_splits, slots, heads] float32, with splits only
    out_sum,
    query,  # [T, heads, HEAD_SIZE + REST_SIZE]
    keys,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE + REST_SIZE]
    values,  # [num_blocks, BLOCK_SIZE, kv_heads, VALUE_SIZE]; unused with LATENT
    key_scales,  # float32: [1], or [num_blocks, BLOCK_SIZE, kv_heads]
    value_scales,
    sinks,  # [heads]
    block_table,  # [R, P]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    num_requests,
    num_tokens,
    num_splits,
    scale,
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
    out_split_stride,
    out_token_stride,
    out_head_stride,
    num_heads,
    num_slots,
    SHORT: tl.constexpr,  # the short launch
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
    SPLIT: tl.constexpr,  # whether num_splits > 1
    WINDOW: tl.constexpr,  # 0 for none
    SOFT_CAP: tl.constexpr,  # 0 for none
    SINKS: tl.constexpr,
    LATENT: tl.constexpr,
    SCALES: tl.constexpr,  # 0: none, 1: one for all, 2: for each token and head
    FP8: tl.constexpr,  # see `numbers.widen`
):
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = query.dtype.element_ty
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)

    if SHORT:
        request = tl.minimum(tile, num_requests)
        tile = tile - request
    else:
        request, tile = find_request(query_start_loc, num_requests, tile, BLOCK_Q)
    is_real = request < num_requests
    start = tl.load(query_start_loc + request)
    stop = tl.load(query_start_loc + request + 1, mask=is_real, other=num_tokens)
    first_token = start + tile * BLOCK_Q
    if first_token >= stop:
        return
    if SHORT:
        if is_real & (stop - start > BLOCK_Q):
            return
    elif is_real & (stop - start <= SKIPPED):
        return
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // HEADS
    group_head = head_tile * HEADS + row % HEADS
    head = kv_head * GROUP + group_head
    is_row = (row < BLOCK_Q * HEADS) & (token < stop) & (group_head < GROUP)
    before = seq_len - (stop - start)  # tokens of the sequence before this step's
    position = before + token - start
    first_position = before + first_token - start
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1

    dim = tl.arange(0, HEAD_PAD)
    rest_dim = tl.arange(0, REST_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    query_row = query + token.to(tl.int64)[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(query_row + dim[None, :], mask=is_row[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    if LATENT:
        rest_mask = is_row[:, None] & (rest_dim < REST_SIZE)[None, :]
        q_rest = tl.load(query_row + HEAD_SIZE + rest_dim[None, :], mask=rest_mask, other=0.0)

    best = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS and not SPLIT:
        best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    summed = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
    score_scale = scale
    if SCALES == 1:
        score_scale = score_scale * tl.load(key_scales)
        value_factor = value_factor * tl.load(value_scales)
    if SOFT_CAP == 0.0:
        score_scale = score_scale * LOG2_E

    # Keys that some row attends to: [first, end). Keys of this split: [low, high). Every row attends to those before
    # `plain`, which need no mask.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0)
    end = last_position + 1
    low = first
    high = end
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - first, num_splits), BLOCK_N) * BLOCK_N
        low = first + split * share
        high = tl.minimum(low + share, end)
    plain = low
    if WINDOW == 0:
        plain = low + tl.maximum(tl.minimum(first_position + 1, high) - low, 0) // BLOCK_N * BLOCK_N

    table_row = block_table + request.to(tl.int64) * table_stride
    column = tl.arange(0, BLOCK_N)
    for MASKED in tl.static_range(2):
        walk_from = plain if MASKED else low
        walk_to = high if MASKED else plain
        for at in tl.range(walk_from, walk_to, BLOCK_N):
            key_at = at + column
            is_key = key_at < high
            block = tl.load(table_row + key_at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            slot = key_at % BLOCK_SIZE
            key_row = keys + block * key_block_stride + slot * key_slot_stride + kv_head * key_head_stride
            if LATENT:
                v_mask = (dim < HEAD_SIZE)[None, :]
                if MASKED:
                    v_mask = v_mask & is_key[:, None]
                v = widen(tl.load(key_row[:, None] + dim[None, :], mask=v_mask, other=0.0), DTYPE, FP8)
                rest_key_mask = (rest_dim < REST_SIZE)[:, None]
                if MASKED:
                    rest_key_mask = rest_key_mask & is_key[None, :]
                k_rest = tl.load(key_row[None, :] + HEAD_SIZE + rest_dim[:, None], mask=rest_key_mask, other=0.0)
                scores = tl.dot(q, tl.trans(v), input_precision="ieee")
                scores = tl.dot(q_rest, widen(k_rest, DTYPE, FP8), scores, input_precision="ieee")
            else:
                k_mask = (dim < HEAD_SIZE)[:, None]
                if MASKED:
                    k_mask = k_mask & is_key[None, :]
                k = widen(tl.load(key_row[None, :] + dim[:, None], mask=k_mask, other=0.0), DTYPE, FP8)
                scores = tl.dot(q, k, input_precision="ieee")
            scores = scores * score_scale
            if SCALES == 2:
                scale_row = (
                    key_scales
                    + block * key_scale_block_stride
                    + slot * key_scale_slot_stride
                    + kv_head * key_scale_head_stride
                )
                scores = scores * tl.load(scale_row, mask=is_key, other=0.0)[None, :]
            if SOFT_CAP > 0.0:
                scores = tanh(scores / SOFT_CAP) * (SOFT_CAP * LOG2_E)
            if MASKED:
                is_seen = (key_at[None, :] <= position[:, None]) & is_key[None, :]
                if WINDOW > 0:
                    is_seen = is_seen & (key_at[None, :] > position[:, None] - WINDOW)
                scores = tl.where(is_seen, scores, -float("inf"))

            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            faded = tl.exp2(best - new_best)
            total = total * faded + tl.sum(weights, 1)
            summed = summed * faded[:, None]
            best = new_best

            if not LATENT:
                value_row = values + block * value_block_stride + slot * value_slot_stride + kv_head * value_head_stride
                v_mask = (value_dim < VALUE_SIZE)[None, :]
                if MASKED:
                    v_mask = v_mask & is_key[:, None]
                v = widen(tl.load(value_row[:, None] + value_dim[None, :], mask=v_mask, other=0.0), DTYPE, FP8)
            if SCALES == 2:
                if LATENT:
                    value_scale = tl.load(scale_row, mask=is_key, other=0.0)
                else:
                    value_scale = tl.load(
                        value_scales
                        + block * value_scale_block_stride
                        + slot * value_scale_slot_stride
                        + kv_head * value_scale_head_stride,
                        mask=is_key,
                        other=0.0,
                    )
                # A small weight times a small scale may underflow in float16.
                if query.dtype.element_ty == tl.float16:
                    v = (v.to(tl.float32) * value_scale[:, None]).to(DTYPE)
                else:
                    weights = weights * value_scale[None, :]
            summed = tl.dot(weights.to(DTYPE), v, summed, input_precision="ieee")

    summed = summed * value_factor
    slot = token
    if SPLIT and SHORT:
        slot = request * BLOCK_Q + token - start
    place = split.to(tl.int64) * out_split_stride + slot.to(tl.int64) * out_token_stride + head * out_head_stride
    out_mask = is_row[:, None] & (value_dim < VALUE_SIZE)[None, :]
    if not SPLIT:
        summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        partial = (split.to(tl.int64) * num_slots + slot) * num_heads + head
        tl.store(out_max + partial, best, mask=is_row)
        tl.store(out_sum + partial, total, mask=is_row)
        if low >= high:
            return  # `combine` ignores partial results with a sum of 0
    tl.store(out + place[:, None] + value_dim[None, :], summed.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_splits", "query_start_loc"])
def combine(
    out,  # [T, heads, VALUE_SIZE]
    partial,  # [num_splits, slots, heads, VALUE_SIZE] float32
    partial_max,  # [num_splits, slots, heads] float32
    partial_sum,
    sinks,
    query_start_loc,
    num_requests,
    num_tokens,
    num_splits,
    num_heads,
    out_token_stride,
    out_head_stride,
    SHORT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Reduces the partial sums of all splits to one result."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    token = slot
    if SHORT:
        request = tl.minimum(slot // BLOCK_Q, num_requests)
        is_real = request < num_requests
        start = tl.load(query_start_loc + request)
        stop = tl.load(query_start_loc + request + 1, mask=is_real, other=num_tokens)
        token = start + slot - request * BLOCK_Q
        if (token >= stop) | (is_real & (stop - start > BLOCK_Q)):
            return
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, VALUE_PAD)
    place = (split.to(tl.int64) * tl.num_programs(0) + slot) * num_heads + head
    is_split = split < num_splits
    total = tl.load(partial_sum + place, mask=is_split, other=0.0)
    best = tl.load(partial_max + place, mask=is_split, other=LOWEST)
    overall = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        overall = tl.maximum(overall, sink)
    weights = tl.exp2(best - overall)
    divisor = tl.sum(total * weights, 0)
    if SINKS:
        divisor += tl.exp2(sink - overall)
    mask = (total > 0.0)[:, None] & (dim < VALUE_SIZE)[None, :]
    parts = tl.load(partial + place[:, None] * VALUE_SIZE + dim[None, :], mask=mask, other=0.0)
    found = tl.sum(parts * weights[:, None], 0) / tl.where(divisor > 0.0, divisor, 1.0)
    target = out + token.to(tl.int64) * out_token_stride + head * out_head_stride + dim
    tl.store(target, found.to(out.dtype.element_ty), mask=dim < VALUE_SIZE)
