"""Kernel of expert routing: scores, groups, top-k and weights of a token in one program.

Scores are compared as keys, integers of the same order in which a NaN is larger than any number. A chosen expert's key
becomes TAKEN, which is smaller than that of minus infinity, so the experts of a token are distinct.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

TAKEN = tl.constexpr(-0x80000000)
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def keys_of(values):
    """Integers in the order of float32 numbers."""
    bits = values.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, keys)


@triton.jit
def take_largest(keys, each, SIZE: tl.constexpr):
    """The index of the largest key, the first of equal ones, and the keys with that one taken."""
    index = tl.min(tl.where(keys == tl.max(keys, 0), each, SIZE), 0)
    return index, tl.where(each == index, TAKEN, keys)


@triton.jit
def best_groups(
    scores,
    keys,
    each,
    EXPERTS_PAD: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
):
    """Which experts are in the groups whose BEST_OF_GROUP largest scores have the largest sums."""
    group = tl.arange(0, GROUPS_PAD)
    sums = tl.zeros([GROUPS_PAD], dtype=tl.float32)
    group_of_each = each // GROUP_SIZE
    for number in tl.static_range(NUM_GROUPS):
        left = tl.where(group_of_each == number, keys, TAKEN)
        total = 0.0
        for _ in tl.static_range(BEST_OF_GROUP):
            index, left = take_largest(left, each, EXPERTS_PAD)
            total += tl.sum(tl.where(each == index, scores, 0.0), 0)
        sums = tl.where(group == number, total, sums)
    left = tl.where(group < NUM_GROUPS, keys_of(sums), TAKEN)
    is_in = each < 0
    for _ in tl.static_range(TOP_GROUPS):
        index, left = take_largest(left, group, GROUPS_PAD)
        is_in = is_in | (group_of_each == index)
    return is_in


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    constants = specialization.constants
    if constants["TOP_GROUPS"] < constants["NUM_GROUPS"]:
        return "grouped_topk"
    return "topk_sigmoid" if constants["SCORES"] == SIGMOID.value else "topk_softmax"


@triton.jit(repr=_kernel_name)
def fused_topk(
    weights,  # [T, TOP_K] float32
    ids,  # [T, TOP_K] int64
    logits,  # [T, NUM_EXPERTS]
    correction,  # [NUM_EXPERTS] float32, if CORRECTED
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, EXPERTS_PAD)
    is_expert = each < NUM_EXPERTS
    x = tl.load(logits + token * logits_stride + each, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SCORES == SIGMOID:
        values = 1.0 / (1.0 + tl.exp(-x))
    elif SCORES == SOFTMAX:
        powers = tl.exp(x - tl.max(x, 0))
        values = powers / tl.sum(powers, 0)
    else:
        values = x
    by = values
    if CORRECTED:
        by += tl.load(correction + each, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, keys_of(by), TAKEN)
    if TOP_GROUPS < NUM_GROUPS:
        is_in = best_groups(
            by, keys, each, EXPERTS_PAD, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, GROUPS_PAD, TOP_GROUPS, BEST_OF_GROUP
        )
        keys = tl.where(is_in | (keys == TAKEN), keys, TAKEN + 1)
    place = tl.arange(0, CHOSEN_PAD)
    chosen = tl.zeros([CHOSEN_PAD], dtype=tl.int32)
    found = tl.full([CHOSEN_PAD], float("-inf") if SCORES == SOFTMAX_OF_CHOSEN else 0.0, dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        index, keys = take_largest(keys, each, EXPERTS_PAD)
        chosen = tl.where(place == number, index, chosen)
        found = tl.where(place == number, tl.sum(tl.where(each == index, values, 0.0), 0), found)
    if SCORES == SOFTMAX_OF_CHOSEN:
        powers = tl.exp(found - tl.max(found, 0))
        found = powers / tl.sum(powers, 0)
    if NORMALIZE:
        found = found / (tl.sum(found, 0) + 1e-20)
    target = token * TOP_K + place
    tl.store(weights + target, found * scale, mask=place < TOP_K)
    tl.store(ids + target, chosen.to(tl.int64), mask=place < TOP_K)
