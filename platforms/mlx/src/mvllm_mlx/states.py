"""Operations on sequence states: Mamba's convolution and state-space model, and linear attention with a delta rule.

A step's requests are computed in one or two parts, as for attention: those with one token, and the others, padded to a
power of two. Padding tokens leave a state as it is. Each part is computed in chunks of its tokens, for all requests at
once:

    tokens   a | b₀ b₁ b₂ | c      part 1   a  c          part 2   b₀ b₁ b₂ ·      result   a  b₀ b₁ b₂  c

The indices are computed once per step on the host (`StateStep.of`) and are the same for every layer. States, decays and
sums are float32. Within a chunk the formulas are those of https://arxiv.org/abs/2405.21060 (section 6) for `ssd`, and
of https://arxiv.org/abs/2412.06464 (section 3) for the delta rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mvllm_graph import Node
from mvllm_mlx.lowering import Lowering, Run, power_of_two
from mvllm_mlx.named import softplus

Array = Any

CHUNK = 64
CHUNK_WITH_CHANNEL_DECAYS = 16
"""Tokens of a chunk. There may be one decay for each pair of tokens and channel."""


@dataclass(frozen=True)
class StatePart:
    """Some requests of a step, with equally many tokens after padding.

    Attributes:
        tokens: int32 [M, Q]: the tokens of each request; 0 for padding.
        lengths: int32 [M]: how many of them are tokens of the request.
        read: int32 [M]: slot of the state before the step; -1 for zeros.
        write: int32 [M]: slot of the state after it; the last one, which is scratch memory, for none.
    """

    tokens: Array
    lengths: Array
    read: Array
    write: Array


@dataclass(frozen=True)
class StateStep:
    """The indices of one step.

    Attributes:
        parts: At most two parts.
        results: int32 [T]: where the result of each token is among the tokens of all parts.
    """

    parts: tuple[StatePart, ...]
    results: Array

    @classmethod
    def of(cls, inputs: Mapping[str, np.ndarray], num_tokens: int, num_slots: int) -> StateStep:
        """The indices of a step, as NumPy arrays.

        Args:
            inputs: query_start_loc, read_slots and write_slots.
            num_tokens: Tokens of the step.
            num_slots: Slots of a state, without the scratch memory.
        """
        starts, read, write = inputs["query_start_loc"], inputs["read_slots"], inputs["write_slots"]
        counts = np.diff(starts)
        results = np.zeros(num_tokens, np.int32)
        parts, offset = [], 0
        for rows in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)):
            if not len(rows):
                continue
            # A request that is repeated as padding computes and writes the same again.
            rows = np.resize(rows, power_of_two(len(rows)))
            lengths = counts[rows].astype(np.int32)
            queries = power_of_two(int(lengths.max()))
            query = np.arange(queries, dtype=np.int32)
            real = query < lengths[:, None]
            tokens = np.where(real, starts[rows, None] + query, 0).astype(np.int32)
            at = offset + np.arange(len(rows), dtype=np.int32)[:, None] * queries + query
            results[tokens[real]] = at[real]
            offset += len(rows) * queries
            slots = np.where(write[rows] < 0, num_slots, write[rows]).astype(np.int32)
            parts.append(StatePart(tokens, lengths, read[rows], slots))
        return cls(tuple(parts), results)

    def flat(self) -> list[Array]:
        """All arrays, for a compiled function."""
        return [*(a for p in self.parts for a in (p.tokens, p.lengths, p.read, p.write)), self.results]

    def with_arrays(self, arrays: Sequence[Array]) -> StateStep:
        """A copy with other arrays, in the order of `flat`."""
        return StateStep(tuple(StatePart(*arrays[i : i + 4]) for i in range(0, len(arrays) - 1, 4)), arrays[-1])


Advance = Callable[..., tuple[Array, Array]]
"""(states [M, ...], lengths [M], *inputs [M, Q, ...]) to results [M, Q, ...] and new states."""


def _advanced(run: Run, name: str, inputs: Sequence[Array], advance: Advance) -> Array:
    """Results [T, ...] of a recurrence over the requests of the step, whose states it updates."""
    step, state = run.states, run.values[name]
    assert step is not None, "a graph with states gets the step's indices"
    results = []
    for part in step.parts:
        requests, queries = part.tokens.shape
        real = mx.arange(queries) < part.lengths[:, None]
        gathered = [_masked(real, x[part.tokens]) for x in inputs]
        before = _masked(part.read >= 0, state[mx.maximum(part.read, 0)])
        y, after = advance(before, part.lengths, *gathered)
        state[part.write] = after.astype(state.dtype)
        results.append(y.reshape(requests * queries, *y.shape[2:]))
    run.values[name] = state
    if not results:  # only padding
        return mx.zeros_like(inputs[-1])
    return (results[0] if len(results) == 1 else mx.concatenate(results))[step.results]


def _masked(mask: Array, x: Array) -> Array:
    """Rows of x, zeros where the mask does not hold: what is there may be infinite or NaN."""
    return mx.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, mx.array(0, dtype=x.dtype))


def _in_chunks(size: int, chunk: Callable[..., tuple[Array, Array]], state: Array, inputs: Sequence[Array]) -> Any:
    """A recurrence whose inputs are [M, Q, H, ...]: `chunk` gets parts of them as [M, H, L, ...]."""
    inputs = [x.swapaxes(1, 2) for x in inputs]
    results = []
    for start in range(0, inputs[0].shape[2], size):
        y, state = chunk(state, *(x[:, :, start : start + size] for x in inputs))
        results.append(y)
    y = results[0] if len(results) == 1 else mx.concatenate(results, axis=2)
    return y.swapaxes(1, 2), state


def decay_between(log_decay: Array) -> Array:
    """exp of the sum of log_decay[j + 1] to log_decay[i], at [..., i, j]; 1 for i = j and 0 for i < j.

    It sums differences: differences of sums have lost the small numbers after a large negative one.
    """
    size = log_decay.shape[-1]
    below = mx.arange(size)[:, None] > mx.arange(size)
    sums = mx.cumsum(mx.where(below, log_decay[..., None], mx.array(0.0)), axis=-2)
    return mx.tril(mx.exp(sums))


def _repeated(x: Array, num_heads: int) -> Array:
    """[M, L, groups, N] for each head of a group."""
    return x if x.shape[2] == num_heads else mx.repeat(x, num_heads // x.shape[2], axis=2)


# ------------------------------------------------------------------------------------------------------------- Mamba


def causal_conv1d(run: Run, node: Node) -> Sequence[Any]:
    """A filter over the last inputs of each channel."""
    x, weight, bias = run.inputs(node)[:3]
    size = weight.shape[1] - 1
    filters = weight.astype(mx.float32)

    def advance(tail: Array, lengths: Array, tokens: Array) -> tuple[Array, Array]:
        inputs = mx.concatenate([tail.swapaxes(1, 2), tokens], axis=1)  # [M, size + Q, channels]
        wide, count = inputs.astype(mx.float32), tokens.shape[1]
        y = sum(wide[:, k : k + count] * filters[:, k] for k in range(size + 1))
        last = (lengths[:, None] + mx.arange(size))[..., None]
        return y, mx.take_along_axis(inputs, last, axis=1).swapaxes(1, 2)

    y = _advanced(run, str(node.inputs[3]), [x], advance)
    y = y if bias is None else y + bias.astype(mx.float32)
    return [(y * mx.sigmoid(y) if node.attributes["activation"] == "silu" else y).astype(x.dtype)]


def ssd(run: Run, node: Node) -> Sequence[Any]:
    """The state-space model of Mamba-2."""
    x, dt, a, b, c, d, dt_bias = run.inputs(node)[:7]
    num_heads = x.shape[1]
    x_dtype, x, dt = x.dtype, x.astype(mx.float32), dt.astype(mx.float32)
    steps = softplus(dt if dt_bias is None else dt + dt_bias)
    steps = mx.clip(steps, node.attributes["dt_min"], node.attributes["dt_max"])

    def chunk(h: Array, b: Array, c: Array, dt: Array, x: Array) -> tuple[Array, Array]:
        dt = dt[..., 0]
        log_decay = dt * a[:, None]
        since_start, between = mx.exp(mx.cumsum(log_decay, axis=-1)), decay_between(log_decay)
        weights = (c @ b.swapaxes(2, 3)) * between * dt[:, :, None]
        y = weights @ x + (c @ h.swapaxes(2, 3)) * since_start[..., None]
        remaining = x * (dt * between[:, :, -1])[..., None]
        return y, h * since_start[:, :, -1, None, None] + remaining.swapaxes(2, 3) @ b

    def advance(h: Array, _: Array, b: Array, c: Array, dt: Array, x: Array) -> Any:
        return _in_chunks(CHUNK, chunk, h, (_repeated(b, num_heads), _repeated(c, num_heads), dt[..., None], x))

    inputs = [b.astype(mx.float32), c.astype(mx.float32), steps, x]
    y = _advanced(run, str(node.inputs[7]), inputs, advance)
    return [(y if d is None else y + x * d[:, None]).astype(x_dtype)]


# -------------------------------------------------------------------------------------------------------- delta rules


def _delta_rule(size: int, products: Callable[..., tuple[Array, Array, Array]]) -> Lowering:
    def lower(run: Run, node: Node) -> Sequence[Any]:
        q, k, v, g, beta = run.inputs(node)[:5]
        dtype, num_heads = v.dtype, v.shape[1]
        q, k, v, g, beta = (x.astype(mx.float32) for x in (q, k, v, g, beta))
        if node.attributes["l2_norm"]:
            q, k = (x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        g = g if g.ndim == 3 else g[..., None]

        def chunk(s: Array, q: Array, k: Array, g: Array, beta: Array, v: Array) -> tuple[Array, Array]:
            since_start = mx.exp(mx.cumsum(g, axis=2))
            of_keys, of_queries, until_end = products(q, k, g)
            differences = (v - (k * since_start) @ s) * beta
            corrections = _unit_lower_inverse(mx.tril(of_keys, -1) * beta) @ differences
            y = (q * since_start) @ s + of_queries @ corrections
            return y, s * since_start[:, :, -1, :, None] + (k * until_end).swapaxes(2, 3) @ corrections

        def advance(s: Array, _: Array, q: Array, k: Array, g: Array, beta: Array, v: Array) -> Any:
            return _in_chunks(size, chunk, s, (_repeated(q, num_heads), _repeated(k, num_heads), g, beta, v))

        inputs = [q * node.attributes["scale"], k, g, beta[..., None], v]
        return [_advanced(run, str(node.inputs[5]), inputs, advance).astype(dtype)]

    return lower


def _products(q: Array, k: Array, g: Array) -> tuple[Array, Array, Array]:
    """Decayed products of keys and of queries with earlier keys, and the decays until the last token."""
    decays, transposed = decay_between(g[..., 0]), k.swapaxes(2, 3)
    return (k @ transposed) * decays, (q @ transposed) * decays, decays[:, :, -1, :, None]


def _products_with_channel_decays(q: Array, k: Array, g: Array) -> tuple[Array, Array, Array]:
    decays = decay_between(g.swapaxes(2, 3))  # [M, H, K, L, L]
    earlier = k.swapaxes(2, 3)[..., None, :] * decays
    of_keys, of_queries = ((x.swapaxes(2, 3)[..., None] * earlier).sum(axis=2) for x in (k, q))
    return of_keys, of_queries, decays[..., -1, :].swapaxes(2, 3)


def _unit_lower_inverse(below: Array) -> Array:
    """The inverse of 1 + `below`, [..., L, L], by inverses of diagonal blocks of 1, 2, 4, ... rows."""
    size = below.shape[-1]
    row, block = np.arange(size), 1
    inverse = mx.broadcast_to(mx.eye(size), below.shape)
    while block < size:
        index = row // block
        is_left_of_diagonal = mx.array((index[:, None] == index + 1) & (index[:, None] % 2 == 1))
        inverse = inverse - inverse @ mx.where(is_left_of_diagonal, below, mx.array(0.0)) @ inverse
        block *= 2
    return inverse


STATES: dict[str, Lowering] = {
    "causal_conv1d": causal_conv1d,
    "ssd": ssd,
    "gated_delta_rule": _delta_rule(CHUNK, _products),
    "kda": _delta_rule(CHUNK_WITH_CHANNEL_DECAYS, _products_with_channel_decays),
}
"""The lowerings by name."""
