"""Kernels of token sampling with min_p, top_k and top_p, without sorting the vocabulary.

Each filter keeps the most probable tokens of a row, so each is a threshold: the smallest kept logit. Logits are
compared as keys, which are integers of the same order in [0, 2**32). A radix select finds a threshold digit by digit,
with histograms of the tokens' number and weight:

    key     [ 11 bits | 11 bits | 10 bits ]

    level   histogram of                                     threshold    rows with
    0       the first digit of every token                                top_k or top_p
    1, 2    the second, third digit of tokens that start     of top_k     top_k
            with the digits found before                     of top_p     top_p alone
    3, 4    likewise                                         of top_p     top_k and top_p

Several programs share a row, and add to its histograms with integer atomics, so the result does not depend on their
order. A weight, which is at most 1, is a fixed-point number with 40 bits after the point: a row of 2**22 tokens fits in
int64. Each program of a level first finds the digit of the level before. Tokens that tie with the last one are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_ORDER = tl.constexpr(-0x80000000)
ONE = tl.constexpr(float(1 << 40))
"""The fixed-point number 1."""

DIGITS = tl.constexpr(2048)
"""Digits of a histogram. It stores the largest digit first."""

LEVELS = tl.constexpr(5)
STATE = tl.constexpr(4)
"""Numbers that a level stores for a row: prefix, goal, weight above the prefix, smallest key."""


@triton.jit
def order_of(value):
    """int32 that compare as float32 values do; a NaN is below every number."""
    value = tl.where(value == 0.0, 0.0, value)  # minus zero equals zero
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, LOWEST_ORDER, order)


@triton.jit
def key_of(value):
    """The order as int64 in [0, 2**32)."""
    return order_of(value).to(tl.int64) + 0x80000000


@triton.jit
def fraction_of(total, p):
    """p * total for a fixed-point `total` < 2**62 and a float32 `p` in [0, 1), rounded down; at least 1."""
    part = (p * 1073741824.0).to(tl.int64)
    product = (total >> 30) * part + (((total & 0x3FFFFFFF) * part) >> 30)
    return tl.maximum(product, 1)


@triton.jit
def sum_copies(histogram, num_copies):
    """The sum of copies of a histogram: [DIGITS] int64."""
    place = tl.arange(0, DIGITS)
    total = tl.load(histogram + place).to(tl.int64)
    for copy in tl.range(1, num_copies):
        total += tl.load(histogram + copy * DIGITS + place).to(tl.int64)
    return total


@triton.jit
def first_place_reaching(amounts, goal):
    """Where the running sum of `amounts` reaches `goal`; the last place if it does not."""
    reached = tl.cumsum(amounts, 0) >= goal
    return tl.min(tl.where(reached, tl.arange(0, DIGITS), DIGITS - 1), 0)


@triton.jit
def sum_before(amounts, place):
    """The sum of `amounts` before a place."""
    return tl.sum(tl.where(tl.arange(0, DIGITS) < place, amounts, 0), 0)


@triton.jit
def state_of_level(
    counts,  # of the row: [num_copies + 2, DIGITS] int32
    weights,  # [num_copies + 4, DIGITS] int64
    states,  # [LEVELS, STATE] int64
    k,
    p,
    least,  # the smallest key that min_p keeps
    size,
    num_copies,
    LEVEL: tl.constexpr,
):
    """What is known once the levels before LEVEL are counted: prefix, goal, weight above the prefix, smallest key.

    The threshold starts with the prefix. It is the largest one with `goal` tokens or weight at or above it, counting
    only what starts with the prefix and is at least the smallest key.
    """
    by_count = (k < size) & (LEVEL < 3)
    if LEVEL == 1:
        prefix = tl.full([], 0, tl.int64)
        above = tl.full([], 0, tl.int64)
        goal = prefix
        lowest = least
        number, weight = sum_copies(counts, num_copies), sum_copies(weights, num_copies)
        if by_count:
            goal = tl.minimum(k.to(tl.int64), tl.sum(number, 0))
        else:
            goal = fraction_of(tl.sum(weight, 0), p)
    else:
        known = states + (LEVEL - 1) * STATE
        prefix, goal = tl.load(known), tl.load(known + 1)
        above, lowest = tl.load(known + 2), tl.load(known + 3)
        weight = sum_copies(weights + (num_copies + LEVEL - 2) * DIGITS, 1)
        number = weight
        if LEVEL <= 3:
            number = sum_copies(counts + (num_copies + LEVEL - 2) * DIGITS, 1)
    if LEVEL == 3:  # top_k's threshold is complete: top_p divides the weight at or above it
        place = first_place_reaching(number, goal)
        lowest = tl.maximum(lowest, (prefix << 10) | (1023 - place))
        total = above + sum_before(weight, place + 1)
        goal = fraction_of(total, p)
        prefix = tl.full([], 0, tl.int64)
        weight = sum_copies(weights, num_copies)
        number = weight
    amounts = tl.where(by_count, number, weight)
    place = first_place_reaching(amounts, goal)
    goal -= sum_before(amounts, place)
    above += sum_before(weight, place)
    if (LEVEL == 2) | (LEVEL == 4):
        prefix = (prefix << 11) | (2047 - place)
    else:
        prefix = (2047 - place).to(tl.int64)
    return prefix, goal, above, lowest


@triton.jit(do_not_specialize=["num_copies", "piece_size"])
def top_k_top_p_histogram(
    counts,  # [rows, num_copies + 2, DIGITS] int32, zeros at first
    weights,  # [rows, num_copies + 4, DIGITS] int64, zeros at first
    states,  # [rows, LEVELS, STATE] int64
    logits,  # [rows, size] float32
    row_stride,
    peaks,  # [rows] float32, likewise below
    inv_temperature,
    min_p_gap,
    top_k,  # [rows] int32 or int64
    top_p,
    size,
    num_copies,  # of the histogram of level 0, so that fewer programs add to the same address
    piece_size,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts a piece of a row in the histogram of a level."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    has_k, has_p = k < size, p < 1.0
    wanted = (has_k & has_p) if LEVEL >= 3 else (has_k | has_p)
    if not wanted:
        return
    counts += row * (num_copies + 2) * DIGITS
    weights += row * (num_copies + 4) * DIGITS
    states += row * (LEVELS * STATE)
    logits += row * row_stride
    peak, inverse = tl.load(peaks + row), tl.load(inv_temperature + row)
    lowest = key_of(peak + tl.load(min_p_gap + row))
    prefix = tl.full([], 0, tl.int64)
    if LEVEL == 0:
        counts += (piece % num_copies) * DIGITS
        weights += (piece % num_copies) * DIGITS
    else:
        prefix, goal, above, lowest = state_of_level(counts, weights, states, k, p, lowest, size, num_copies, LEVEL)
        if piece == 0:
            tl.store(states + LEVEL * STATE, prefix)
            tl.store(states + LEVEL * STATE + 1, goal)
            tl.store(states + LEVEL * STATE + 2, above)
            tl.store(states + LEVEL * STATE + 3, lowest)
        counts += (num_copies + LEVEL - 1) * DIGITS
        weights += (num_copies + LEVEL - 1) * DIGITS
    for start in tl.range(0, piece_size, BLOCK):
        column = piece * piece_size + start + tl.arange(0, BLOCK)
        is_column = column < size
        value = tl.load(logits + column, mask=is_column, other=-float("inf"))
        key = key_of(value)
        is_in = is_column & (key >= lowest)
        if LEVEL == 0:
            digit = 2047 - (key >> 21)
        elif (LEVEL == 1) | (LEVEL == 3):
            is_in = is_in & ((key >> 21) == prefix)
            digit = 2047 - ((key >> 10) & 2047)
        else:
            is_in = is_in & ((key >> 10) == prefix)
            digit = 1023 - (key & 1023)
        if LEVEL <= 2:
            if has_k:
                tl.atomic_add(counts + digit, tl.full([BLOCK], 1, tl.int32), mask=is_in, sem="relaxed")
        if has_p:
            weight = tl.exp((value - peak) * inverse)
            fixed = (tl.where(weight == weight, weight, 0.0) * ONE).to(tl.int64)
            tl.atomic_add(weights + digit, fixed, mask=is_in & (fixed > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_copies"])
def top_k_top_p_threshold(
    thresholds,  # [rows] int32: the order of the smallest kept logit
    counts,
    weights,
    states,
    peaks,
    min_p_gap,
    top_k,
    top_p,
    size,
    num_copies,
):
    """Finds the last digit of each row's threshold."""
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    least = key_of(tl.load(peaks + row) + tl.load(min_p_gap + row))
    if (k < size) | (p < 1.0):
        counts += row * (num_copies + 2) * DIGITS
        weights += row * (num_copies + 4) * DIGITS
        last = tl.where((k < size) & (p < 1.0), 4, 2)
        known = states + row * (LEVELS * STATE) + last * STATE
        weight = sum_copies(weights + (num_copies + last - 1) * DIGITS, 1)
        number = sum_copies(counts + (num_copies + 1) * DIGITS, 1)
        place = first_place_reaching(tl.where(p < 1.0, weight, number), tl.load(known + 1))
        found = (tl.load(known) << 10) | tl.maximum(1023 - place, 0)
        least = tl.maximum(tl.maximum(least, found), tl.load(known + 3))
    tl.store(thresholds + row, (least - 0x80000000).to(tl.int32))


@triton.jit
def weights_of(logits, column, is_column, peak, inverse, least):
    """Weights of a row's tokens in some columns: 0 for those filtered out."""
    value = tl.load(logits + column, mask=is_column, other=-float("inf"))
    return tl.where(is_column & (order_of(value) >= least), tl.exp((value - peak) * inverse), 0.0)


@triton.jit
def sampling_block_sums(
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
def inverse_cdf(weights, uniform, SIZE: tl.constexpr):
    """The first index of positive weight at which the running sum exceeds `uniform` times the total."""
    place = tl.arange(0, SIZE)
    sums = tl.where(weights > 0.0, tl.cumsum(weights, 0), 0.0)
    target = tl.max(sums, 0) * uniform
    return tl.min(tl.where(sums > target, place, SIZE - 1), 0)


@triton.jit
def sample_tokens(
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
    block = tl.minimum(inverse_cdf(shares, tl.load(coarse + row), BLOCKS_PAD), num_blocks - 1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak, inverse, least = tl.load(peaks + row), tl.load(inv_temperature + row), tl.load(thresholds + row)
    weights = weights_of(logits + row * row_stride, column, column < size, peak, inverse, least)
    token = block * BLOCK + inverse_cdf(weights, tl.load(fine + row), BLOCK)
    tl.store(tokens + row, tl.minimum(token, size - 1).to(tl.int64))
