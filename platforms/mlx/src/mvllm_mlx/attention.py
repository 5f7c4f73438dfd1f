"""Paged attention: keys and values are written to slots, gathered by block, and attended to in one or two parts.

A step's requests have different numbers of queries. Requests with one token form the first part, [R, 1] queries; the
others form the second, [M, Q] queries, padded to powers of two, so that few shapes occur:

    tokens   a | b₀ b₁ b₂ | c      part 1   a  c          part 2   b₀ b₁ b₂ ·      result   a  b₀ b₁ b₂  c

The indices are computed once per step on the host (`AttentionStep.of`) and are the same for every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mvllm.plugin_api import AttentionSpec
from mvllm_graph import Node
from mvllm_mlx.lowering import Lowering, Run, power_of_two

Array = Any


@dataclass(frozen=True)
class AttentionPart:
    """Some requests of a step, with equally many queries after padding.

    Attributes:
        tokens: int32 [M, Q]: the token of each query; 0 for padding.
        positions: int32 [M, Q]: its position; 0 for padding.
        blocks: int32 [M, P]: the block table.
        lengths: int32 [M]: tokens of each sequence after the step, at least 1.
        first: int32 [M]: position of each request's first query.
    """

    tokens: Array
    positions: Array
    blocks: Array
    lengths: Array
    first: Array


@dataclass(frozen=True)
class AttentionStep:
    """The indices of one step.

    Attributes:
        parts: One or two parts.
        results: int32 [T]: where the result of each token is among the queries of all parts.
        rows: int32 [T]: the token whose key and value are written; a padding token repeats another one's.
        slots: int32 [T]: the slot of that token; None if the step writes nothing.
    """

    parts: tuple[AttentionPart, ...]
    results: Array
    rows: Array
    slots: Array | None

    @classmethod
    def of(cls, inputs: Mapping[str, np.ndarray], num_blocks: int) -> AttentionStep:
        """The indices of a step, as NumPy arrays.

        Args:
            inputs: block_table.0, slot_mapping.0, query_start_loc and seq_lens.
            num_blocks: Blocks of the caches: entries of the block table that are unspecified may be anything.
        """
        starts, lengths = inputs["query_start_loc"], inputs["seq_lens"]
        blocks = np.clip(inputs["block_table.0"], 0, num_blocks - 1)
        counts = np.diff(starts)
        slots = inputs["slot_mapping.0"]
        results = np.zeros(len(slots), np.int32)
        parts, offset = [], 0
        for rows, queries in _parts_of(counts):
            query = np.arange(queries, dtype=np.int32)
            first = lengths[rows] - counts[rows]
            real = query < counts[rows, None]
            tokens = np.where(real, starts[rows, None] + query, 0).astype(np.int32)
            positions = np.where(real, first[:, None] + query, 0).astype(np.int32)
            at = offset + np.arange(len(rows), dtype=np.int32)[:, None] * queries + query
            results[tokens[real]] = at[real]
            offset += len(rows) * queries
            table = np.ascontiguousarray(blocks[rows], np.int32)
            parts.append(AttentionPart(tokens, positions, table, np.maximum(lengths[rows], 1), first.astype(np.int32)))
        written = np.flatnonzero(slots >= 0)
        if not len(written):
            return cls(tuple(parts), results, np.zeros(len(slots), np.int32), None)
        source = np.where(slots >= 0, np.arange(len(slots)), written[0]).astype(np.int32)
        return cls(tuple(parts), results, source, slots[source])

    def flat(self) -> list[Array]:
        """All arrays, for a compiled function."""
        of_parts = [a for p in self.parts for a in (p.tokens, p.positions, p.blocks, p.lengths, p.first)]
        return [*of_parts, self.results, self.rows, *([] if self.slots is None else [self.slots])]

    def with_arrays(self, arrays: Sequence[Array]) -> AttentionStep:
        """A copy with other arrays, in the order of `flat`."""
        parts = [AttentionPart(*arrays[5 * i : 5 * i + 5]) for i in range(len(self.parts))]
        results, rows, *slots = arrays[5 * len(parts) :]
        return AttentionStep(tuple(parts), results, rows, slots[0] if slots else None)

    @property
    def structure(self) -> tuple[int, bool]:
        """What else than shapes a compiled function depends on."""
        return len(self.parts), self.slots is not None


def _parts_of(counts: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The requests and padded number of queries of each part. The first has all requests, if one has one token."""
    several = np.flatnonzero(counts > 1)
    parts = []
    if len(several) < len(counts) or not len(counts):
        parts.append((np.arange(len(counts)), 1))
    if len(several):
        padded = np.resize(several, power_of_two(len(several)))
        parts.append((padded, power_of_two(int(counts.max()))))
    return parts


def cache_shapes(spec: AttentionSpec, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
    """Shapes of the arrays of one layer's cache: keys, and values if they are stored."""
    sizes = [spec.head_size] if spec.values_in_keys else [spec.head_size, spec.value_size]
    return [(num_blocks, block_size, spec.num_kv_heads, size) for size in sizes]


def paged_attention(run: Run, node: Node) -> Sequence[Any]:
    """Writes the step's keys and values, and attends."""
    query, key, value, sinks = run.inputs(node)[:4]
    name, given, step = str(node.inputs[4]), node.attributes, run.attention
    assert step is not None, "a graph with attention gets the step's indices"
    cache = run.values[name]
    if key is not None and step.slots is not None:
        new = [key, value][: len(cache)]
        cache = [_written(stored, x[step.rows], step.slots) for stored, x in zip(cache, new, strict=True)]
        run.values[name] = cache
    value_size = given["value_head_size"] or given["head_size"]
    results = [_attend(query, cache, part, sinks, given, value_size) for part in step.parts]
    flat = results[0] if len(results) == 1 else mx.concatenate(results)
    return [flat[step.results]]


def _written(cache: Array, rows: Array, slots: Array) -> Array:
    """The cache with rows in slots. MLX writes in place if nothing else refers to the memory."""
    flat = cache.reshape(-1, *cache.shape[2:])
    flat[slots] = rows.astype(cache.dtype)
    return flat.reshape(cache.shape)


def _attend(
    query: Array, cache: Sequence[Array], part: AttentionPart, sinks: Array | None, given: Mapping[str, Any], size: int
) -> Array:
    """Attention of one part: [M * Q, heads * size]."""
    dtype, window = query.dtype, given["sliding_window"]
    requests, queries = part.tokens.shape
    gathered = [stored[part.blocks].reshape(requests, -1, *stored.shape[2:]) for stored in cache]
    length = gathered[0].shape[1]
    position = mx.arange(length, dtype=mx.int32)
    used = position < part.lengths[:, None]
    mask = position <= part.positions[..., None]
    if window is not None:
        used = mx.logical_and(used, position > (part.first - window)[:, None])
        mask = mx.logical_and(mask, position > (part.positions - window)[..., None])
    # What is stored elsewhere may be anything, also infinite or NaN.
    keys, *rest = (mx.where(used[..., None, None], x.astype(dtype), mx.array(0, dtype=dtype)) for x in gathered)
    values = rest[0] if rest else keys[..., :size]
    groups = given["num_heads"] // given["num_kv_heads"]
    q = query[part.tokens.reshape(-1)].reshape(requests, queries, given["num_kv_heads"], groups, -1)
    # A product of 16-bit arrays has 16-bit results, in which a large score is off by several percent of its share.
    q = q.transpose(0, 2, 3, 1, 4).astype(mx.float32)
    scores = (q @ keys.transpose(0, 2, 3, 1)[:, :, None].astype(mx.float32)) * given["scale"]
    if given["soft_cap"] is not None:
        scores = given["soft_cap"] * mx.tanh(scores / given["soft_cap"])
    scores = mx.where(mask[:, None, None], scores, mx.array(-mx.inf))
    highest = scores.max(axis=-1, keepdims=True)
    sink = None
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, given["num_kv_heads"], groups, 1, 1)
        highest = mx.maximum(highest, sink)
    weights = mx.exp(scores - highest)
    # By block first: a sum of thousands of numbers in one go, as in MLX's softmax, is off by 1e-5.
    total = weights.reshape(*weights.shape[:-1], -1, cache[0].shape[1]).sum(axis=-1).sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - highest)
    result = (weights / total).astype(dtype) @ values.transpose(0, 2, 1, 3)[:, :, None]
    return result.transpose(0, 3, 1, 2, 4).reshape(requests * queries, -1)


ATTENTION: dict[str, Lowering] = {"paged_attention": paged_attention}
"""The lowering by name."""
