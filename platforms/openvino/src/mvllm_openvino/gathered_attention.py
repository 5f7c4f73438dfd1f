"""Attention over gathered blocks, for layers with a soft cap, which OpenVINO's paged attention does not have.

That operation still stores keys and values: each token is given to it as a sequence of its own, in the block of its
slot.

    queries [T, H, D] ── padded to the longest of the step ──> [R, M, H, D]
    blocks  [R, P]    ── gathered ──────────────────────────>  [R, KH, S, D]       S = P * 32 keys
    scores  [R, KH, H / KH * M, S], masked by the positions of queries and keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from openvino import Type
from openvino import opset15 as op

from mvllm.plugin_api import AttentionSpec
from mvllm_openvino.building import Out, constant, integers

BLOCK_SIZE = 32
"""Tokens per block: the only number for which the kernels of OpenVINO's operation on processors are written."""


@dataclass(frozen=True)
class Batch:
    """Requests of a step, from the step inputs; int32.

    Attributes:
        starts: [R]: first token of each request.
        lengths: [R]: its tokens in this step.
        past: [R]: its tokens before the step.
        requests: [T]: the request of each token.
        offsets: [T]: place of each token among its request's.
        longest: []: most tokens of a request in this step, at least 1.
    """

    starts: Out
    lengths: Out
    past: Out
    requests: Out
    offsets: Out
    longest: Out


def make_batch(tokens: Out, query_start_loc: Out, seq_lens: Out) -> Batch:
    """`tokens`: any array [T, ...]."""
    zero, one = constant(0, Type.i32), constant(1, Type.i32)
    later = op.slice(query_start_loc, integers([1]), integers([2**31 - 1]), integers([1]))
    starts = op.slice(query_start_loc, integers([0]), integers([-1]), integers([1])).output(0)
    lengths = op.subtract(later, starts).output(0)
    count = op.gather(op.shape_of(tokens, Type.i32), zero, zero)
    every = op.range(zero, count, one, Type.i32)
    # The request of token t is the number of requests that end at or before it.
    ended = op.less_equal(op.unsqueeze(later, integers([0])), op.unsqueeze(every, integers([1])))
    requests = op.reduce_sum(op.convert(ended, Type.i32), integers([1]), False).output(0)
    offsets = op.subtract(every, op.gather(starts, requests, zero))
    longest = op.maximum(op.reduce_max(lengths, integers([0]), False), one)
    past = op.subtract(seq_lens, lengths)
    return Batch(starts, lengths, past.output(0), requests, offsets.output(0), longest.output(0))


def after(table: Out, written: Out) -> Out:
    """A block table, available only once `written`, a result of OpenVINO's operation, has been computed."""
    element = op.slice(written, integers([0, 0]), integers([1, 1]), integers([1, 1]))
    nothing = op.convert(op.less(element, element), Type.i32)  # always zero
    return op.add(table, op.reshape(nothing, integers([1]), False)).output(0)


def store(attend: Callable[..., Any], key: Out, value: Out, slots: Out) -> Out:
    """Stores keys [T, KH * D] and values in slots; `attend` makes OpenVINO's operation. Returns its first result."""
    size = constant(BLOCK_SIZE, Type.i32)
    zero, one = constant(0, Type.i32), constant(1, Type.i32)
    count = op.gather(op.shape_of(slots, Type.i32), zero, zero)
    begins = op.range(zero, op.add(count, one), one, Type.i32).output(0)
    past = op.floor_mod(slots, size)
    blocks = op.divide(op.subtract(slots, past), size)
    return attend(key, key, value, past.output(0), begins, blocks.output(0), begins, size).output(0)


def attend_gathered(
    spec: AttentionSpec, query: Out, keys: Out, values: Out, sinks: Out | None, batch: Batch, table: Out
) -> Out:
    """Attention of queries [T, H, D] over the caches: [T, H * value_size]."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    group = heads // kv_heads
    zero = constant(0, Type.i32)
    column = op.range(zero, batch.longest, constant(1, Type.i32), Type.i32)
    # [R, M]: the token in each place; places past a request's end hold any token.
    places = op.add(op.unsqueeze(batch.starts, integers([1])), op.unsqueeze(column, integers([0])))
    count = op.gather(op.shape_of(query, Type.i32), zero, zero)
    places = op.minimum(places, op.subtract(count, constant(1, Type.i32)))
    padded = op.gather(query, places, zero)  # [R, M, H, D]
    padded = op.reshape(padded, integers([0, 0, kv_heads, group, spec.head_size]), True)
    padded = op.transpose(padded, integers([0, 2, 3, 1, 4]))  # [R, KH, G, M, D]
    stored_keys, valid = _gathered(keys, table, batch, spec.num_kv_heads, spec.head_size)
    if spec.values_in_keys:
        first = (integers([0]), integers([spec.value_size]), integers([1]), integers([-1]))
        stored_values = op.slice(stored_keys, *first).output(0)
    else:
        stored_values, _ = _gathered(values, table, batch, spec.num_kv_heads, spec.value_size)
    scores = op.matmul(padded, op.unsqueeze(stored_keys, integers([2])), False, True)
    scores = op.multiply(scores, _real(spec.scale))
    if spec.soft_cap is not None:
        scores = op.multiply(op.tanh(op.divide(scores, _real(spec.soft_cap))), _real(spec.soft_cap))
    scores = op.select(_mask(spec, batch, column, valid), scores, _real(-np.inf))
    weights = _softmax(scores, sinks, kv_heads, group)
    made = op.matmul(weights, op.unsqueeze(stored_values, integers([2])), False, False)
    made = op.transpose(made, integers([0, 3, 1, 2, 4]))  # [R, M, KH, G, Dv]
    made = op.reshape(made, integers([-1, heads * spec.value_size]), False)
    own = op.add(op.multiply(batch.requests, batch.longest), batch.offsets)
    return op.gather(made, own, zero).output(0)


def _gathered(cache: Out, table: Out, batch: Batch, heads: int, size: int) -> tuple[Out, Out]:
    """Keys or values [R, KH, S, size], zero where there are none, and the positions [S]."""
    blocks = op.gather(cache, table, constant(0, Type.i32))  # [R, P, KH, 32, size]
    blocks = op.transpose(op.convert(blocks, Type.f32), integers([0, 2, 1, 3, 4]))
    stored = op.reshape(blocks, integers([0, heads, -1, size]), True)
    zero = constant(0, Type.i32)
    length = op.gather(op.shape_of(stored, Type.i32), constant(2, Type.i32), zero)
    positions = op.range(zero, length, constant(1, Type.i32), Type.i32)
    ends = op.unsqueeze(op.add(batch.past, batch.lengths), integers([1]))
    here = op.less(op.unsqueeze(positions, integers([0])), ends)  # [R, S]
    return op.select(op.unsqueeze(here, integers([1, 3])), stored, _real(0.0)).output(0), positions.output(0)


def _mask(spec: AttentionSpec, batch: Batch, column: Out, positions: Out) -> Out:
    """[R, 1, 1, M, S]: whether a query sees a key."""
    own = op.add(op.unsqueeze(batch.past, integers([1])), op.unsqueeze(column, integers([0])))  # [R, M]
    own = op.unsqueeze(own, integers([2]))
    keys = op.unsqueeze(positions, integers([0, 1]))
    seen = op.less_equal(keys, own)
    if spec.sliding_window is not None:
        low = op.subtract(own, constant(spec.sliding_window, Type.i32))
        seen = op.logical_and(seen, op.greater(keys, low))
    return op.unsqueeze(seen, integers([1, 2])).output(0)


def _softmax(scores: Out, sinks: Out | None, kv_heads: int, group: int) -> Out:
    """Softmax over the keys, [R, KH, G, M, S]; a sink takes part and has no weight."""
    if sinks is None:
        return op.softmax(scores, -1).output(0)
    extra = op.reshape(sinks, integers([1, kv_heads, group, 1, 1]), False)
    largest = op.maximum(op.reduce_max(scores, integers([-1]), True), extra)
    powers = op.exp(op.subtract(scores, largest))
    total = op.add(op.reduce_sum(powers, integers([-1]), True), op.exp(op.subtract(extra, largest)))
    return op.divide(powers, total).output(0)


def _real(value: float) -> Out:
    return constant(np.float32(value), Type.f32)
