"""Kernels of token sampling with min_p, top_k and top_p, without sorting the vocabulary.

Each filter keeps the most probable tokens of a row, so each is a threshold: the smallest kept logit. Logits are
compared as integers of the same order (kernels/argmax.py). Each pass over the row finds two bits of the threshold: of
the four quarters of the remaining range, it takes the highest whose lower end has enough tokens (or mass) at or above
it. 16 passes give the exact threshold. Tokens that tie with the last one are kept.

    low                                                   remaining range: 4 * step integers
    |----------|----------|----------|----------|
          low + step  low + 2 step  low + 3 step          candidates for the next low
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_ORDER = tl.constexpr(-0x80000000)


@triton.jit
def order_of(value):
    """int32 that compare as float32 values do; a NaN is below every number."""
    value = tl.where(value == 0.0, 0.0, value)  # minus zero equals zero
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, LOWEST_ORDER, order)


@triton.jit
def find(logits, size, least, peak, inv_temperature, enough, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest order with `enough` tokens (or weight) at or above it, counting only orders >= `least`."""
    low = tl.full([], -0x80000000, dtype=tl.int64)
    step = tl.full([], 0x40000000, dtype=tl.int64)
    for _ in tl.range(0, 16):
        first, second, third = (low + step).to(tl.int32), (low + 2 * step).to(tl.int32), (low + 3 * step).to(tl.int32)
        at_first = tl.zeros([BLOCK], dtype=tl.float32)
        at_second = tl.zeros([BLOCK], dtype=tl.float32)
        at_third = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(logits + column, mask=column < size, other=-float("inf"))
            order = order_of(value)
            is_in = (column < size) & (order >= least)
            if BY_MASS:
                counted = tl.where(is_in, tl.exp((value - peak) * inv_temperature), 0.0)
            else:
                counted = is_in.to(tl.float32)
            at_first += tl.where(order >= first, counted, 0.0)
            at_second += tl.where(order >= second, counted, 0.0)
            at_third += tl.where(order >= third, counted, 0.0)
        quarters = (tl.sum(at_first, 0) >= enough).to(tl.int64) + (tl.sum(at_second, 0) >= enough).to(tl.int64)
        quarters += (tl.sum(at_third, 0) >= enough).to(tl.int64)
        low += step * quarters
        step = step // 4
    return low.to(tl.int32)


@triton.jit
def filter_rows(
    peaks,  # [rows] float32
    thresholds,  # [rows] int32: the order of the smallest kept logit
    logits,  # [rows, size] float32
    row_stride,
    inv_temperature,  # [rows] float32, likewise below
    min_p_gap,
    top_k,  # [rows] int32 or int64
    top_p,
    size,
    GIVEN: tl.constexpr,  # the row maxima are inputs; otherwise they are computed and stored
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    inverse = tl.load(inv_temperature + row)
    if GIVEN:
        peak = tl.load(peaks + row)
    else:
        best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in tl.range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(logits + column, mask=column < size, other=-float("inf")))
        peak = tl.max(best, 0)
        tl.store(peaks + row, peak)
    least = order_of(peak + tl.load(min_p_gap + row))
    k = tl.load(top_k + row)
    if k < size:
        least = tl.maximum(least, find(logits, size, LOWEST_ORDER, peak, inverse, k.to(tl.float32), False, BLOCK))
    p = tl.load(top_p + row)
    if p < 1.0:
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(logits + column, mask=column < size, other=-float("inf"))
            is_in = (column < size) & (order_of(value) >= least)
            mass += tl.where(is_in, tl.exp((value - peak) * inverse), 0.0)
        least = tl.maximum(least, find(logits, size, least, peak, inverse, p * tl.sum(mass, 0), True, BLOCK))
    tl.store(thresholds + row, least)


@triton.jit
def weights_of(logits, column, is_column, peak, inverse, least):
    """Weights of a row's tokens in some columns: 0 for those filtered out."""
    value = tl.load(logits + column, mask=is_column, other=-float("inf"))
    return tl.where(is_column & (order_of(value) >= least), tl.exp((value - peak) * inverse), 0.0)


@triton.jit
def sum_blocks(
    sums,  # [rows, blocks] float32
    logits,
    row_stride,
    peaks,
    thresholds,
    inv_temperature,
    size,
    BLOCK: tl.constexpr,
):
    """Sums the weights of each block of BLOCK tokens."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak, inverse, least = tl.load(peaks + row), tl.load(inv_temperature + row), tl.load(thresholds + row)
    weights = weights_of(logits + row * row_stride, column, column < size, peak, inverse, least)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weights, 0))


@triton.jit
def invert(weights, uniform, SIZE: tl.constexpr):
    """The first index of positive weight at which the running sum exceeds `uniform` times the total."""
    place = tl.arange(0, SIZE)
    sums = tl.where(weights > 0.0, tl.cumsum(weights, 0), 0.0)
    target = tl.max(sums, 0) * uniform
    return tl.min(tl.where(sums > target, place, SIZE - 1), 0)


@triton.jit
def draw(
    tokens,  # [rows] int64
    sums,  # [rows, num_blocks] float32
    coarse,  # [rows] float32
    fine,
    logits,
    row_stride,
    peaks,
    thresholds,
    inv_temperature,
    size,
    num_blocks,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Samples a block by its share of the row's weights, then a token by its share of the block's weights."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCKS_PAD)
    shares = tl.load(sums + row * num_blocks + each, mask=each < num_blocks, other=0.0)
    block = tl.minimum(invert(shares, tl.load(coarse + row), BLOCKS_PAD), num_blocks - 1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak, inverse, least = tl.load(peaks + row), tl.load(inv_temperature + row), tl.load(thresholds + row)
    weights = weights_of(logits + row * row_stride, column, column < size, peak, inverse, least)
    token = block * BLOCK + invert(weights, tl.load(fine + row), BLOCK)
    tl.store(tokens + row, tl.minimum(token, size - 1).to(tl.int64))
