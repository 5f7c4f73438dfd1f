"""Test cases for attention backends, and their exact results.

A case is drawn on the host, copied to the device with the DeviceRuntime, and run with the methods of the contract.
`expected` computes exact attention in float64, without blocks, slots or tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mvllm.extension_api.testing import round_to_kv_dtype, torch_dtype
from mvllm.plugin_api import AttentionBackend, AttentionSpec, BatchLayout, DeviceRuntime, StepKind

_ARRAYS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")

_QUERY_TILE = 256
"""Queries for which `expected` computes scores at once, which bounds their memory."""

OUT_OF_RANGE = 10**6
"""Value in the block table after a request's last block, where entries are undefined and must not be used."""


def tolerance(dtype: str, kv_dtype: str) -> float:
    """Largest allowed difference from exact attention for keys and values of order one.

    float32 adds some hundred products; other dtypes round weights, values and the result once each. Values reach about
    4, so one rounding of the result is up to 4 units of 2^-8 (bfloat16) or 2^-11 (float16). In 8 bits, backends may
    round ties and scales differently than `stored`: one step of int8 at 4, and half a step of float8_e4m3fn.
    """
    allowed = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 6e-3, "int8": 4e-2, "float8_e4m3fn": 0.13}
    return max(allowed.get(dtype, 0.25), allowed.get(kv_dtype, 0.25))


def stored(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Keys or values after rounding to the dtype of the cache: float64, same shape."""
    return round_to_kv_dtype(x, kv_dtype).double()


def make_spec(
    num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64, dtype: str = "float32", **fields: Any
) -> AttentionSpec:
    """An AttentionSpec with the scale 1 / sqrt(head_size); the cache has the compute dtype by default."""
    fields.setdefault("kv_dtype", dtype)
    fields.setdefault("scale", 1 / math.sqrt(head_size))
    return AttentionSpec(num_heads, num_kv_heads, head_size, dtype, **fields)


@dataclass
class Case:
    """A step with some requests: layout, inputs and cached tokens, all on the host.

    Attributes:
        spec: The attention layer.
        requests: (computed tokens, new tokens) of each request.
        layout: The layout that core passes; its device arrays are on the host until `run`.
        keys, values: Per request, the whole sequence: [seq_len, num_kv_heads, head_size or value_size], compute dtype.
        query: [T, num_heads, head_size], compute dtype.
        sinks: [num_heads] or None.
        num_blocks: Blocks in the tables.
        visible_lens: Per request, of the whole sequence: how many leading positions each position sees; None if
            attention is causal.
    """

    spec: AttentionSpec
    requests: list[tuple[int, int]]
    layout: BatchLayout
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    sinks: torch.Tensor | None
    num_blocks: int
    visible_lens: list[np.ndarray] | None = None

    @property
    def num_real_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(new for _, new in self.requests)


def make_layout(
    requests: Sequence[tuple[int, int]],
    tables: np.ndarray,
    block_size: int,
    *,
    padding: int = 0,
    padding_requests: int = 0,
    visible_lens: Sequence[np.ndarray] | None = None,
) -> BatchLayout:
    """The layout of a step.

    Args:
        requests: (computed tokens, new tokens) of each request.
        tables: int32 [R, max_blocks].
        padding: Tokens of padding at the end.
        padding_requests: Requests of padding at the end.
        visible_lens: As in Case.
    """
    lengths = [new for _, new in requests]
    starts = np.concatenate([[0], np.cumsum(lengths), [sum(lengths)] * padding_requests]).astype(np.int32)
    seq_lens = np.array([before + new for before, new in requests] + [0] * padding_requests, dtype=np.int32)
    slots = np.array(
        [
            tables[r, t // block_size] * block_size + t % block_size
            for r, (before, new) in enumerate(requests)
            for t in range(before, before + new)
        ]
        + [-1] * padding,
        dtype=np.int32,
    )
    spare = np.full((padding_requests, tables.shape[1]), OUT_OF_RANGE, dtype=np.int32)
    arrays = (starts, seq_lens, np.concatenate([tables, spare]).astype(np.int32), slots)
    on_device = [torch.from_numpy(array) for array in arrays]
    seen: np.ndarray | None = None
    if visible_lens is not None:
        of_step = [of[before : before + new] for of, (before, new) in zip(visible_lens, requests, strict=True)]
        seen = np.concatenate([*of_step, np.zeros(padding, np.int32)]).astype(np.int32)
    return BatchLayout(
        len(requests) + padding_requests,
        sum(lengths) + padding,
        max(lengths, default=0),
        int(seq_lens.max()),
        block_size,
        *arrays,
        on_device[0],
        on_device[1],
        on_device[2],
        on_device[3],
        kind=StepKind.DECODE if max(lengths, default=0) == 1 else StepKind.MIXED,
        num_decodes=next((i for i, length in enumerate(lengths) if length != 1), len(lengths)),
        visible_lens=seen,
        visible_lens_device=None if seen is None else torch.from_numpy(seen),
    )


def make_case(
    spec: AttentionSpec,
    requests: Sequence[tuple[int, int]],
    *,
    block_size: int,
    seed: int = 0,
    padding: int = 0,
    padding_requests: int = 0,
    spread: float = 1.0,
    spans: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Case:
    """A case with random keys, values and queries of standard deviation `spread`, and blocks in random order.

    Args:
        spans: For each request its non-causal spans: first position, and end.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(spec.dtype)
    needs = [-(-(before + new) // block_size) for before, new in requests]
    num_blocks = sum(needs) + 3
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(requests), max(needs) + 2), OUT_OF_RANGE, dtype=np.int32)
    for r, need in enumerate(needs):
        tables[r, :need], ids = ids[:need], ids[need:]

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    keys = [random(before + new, spec.num_kv_heads, spec.head_size) for before, new in requests]
    if spec.values_in_keys:
        values = [key[..., : spec.value_size] for key in keys]
    else:
        values = [random(before + new, spec.num_kv_heads, spec.value_size) for before, new in requests]
    seen: list[np.ndarray] | None = None
    if spans is not None:
        seen = [_visible_lens(before + new, of) for (before, new), of in zip(requests, spans, strict=True)]
    layout = make_layout(
        requests, tables, block_size, padding=padding, padding_requests=padding_requests, visible_lens=seen
    )
    return Case(
        spec=spec,
        requests=list(requests),
        layout=layout,
        keys=keys,
        values=values,
        query=random(layout.num_tokens, spec.num_heads, spec.head_size),
        sinks=random(spec.num_heads) if spec.sinks else None,
        num_blocks=num_blocks,
        visible_lens=seen,
    )


def _visible_lens(length: int, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """How many leading positions each position of a sequence sees: int32 [length]."""
    seen = np.arange(1, length + 1, dtype=np.int32)
    for start, stop in spans:
        seen[start:stop] = min(stop, length)
    return seen


@dataclass(frozen=True)
class AttentionVariant:
    """How `expected` computes a case: correctly by default, or with one common mistake.

    Attributes:
        spec: Replaces the case's spec.
        heads_in_turn: Query head h reads key/value head h % num_kv_heads.
        future: Number of future keys that a query reads.
        shift: Offset of the positions whose keys and values are read, modulo the length.
        only_new: Tokens computed before the step are not read.
        without_sinks: Sinks are ignored.
        without_spans: Non-causal spans are ignored.
        spans_without_window: A sliding window hides no position from the tokens of a span.
    """

    spec: AttentionSpec | None = None
    heads_in_turn: bool = False
    future: int = 0
    shift: int = 0
    only_new: bool = False
    without_sinks: bool = False
    without_spans: bool = False
    spans_without_window: bool = False


def expected(case: Case, variant: AttentionVariant = AttentionVariant()) -> torch.Tensor:
    """Exact attention: float64 [real tokens, num_heads * value_size]. Keys and values are rounded to `kv_dtype`."""
    spec, outputs, start = variant.spec or case.spec, [], 0
    group = spec.num_heads // spec.num_kv_heads

    def of_query_heads(x: torch.Tensor) -> torch.Tensor:
        x = x.roll(-variant.shift, dims=0)
        return x.repeat(1, group, 1) if variant.heads_in_turn else x.repeat_interleave(group, dim=1)

    for r, ((before, new), keys, values) in enumerate(zip(case.requests, case.keys, case.values, strict=True)):
        k = of_query_heads(stored(keys, spec.kv_dtype))
        v = k[..., : spec.value_size] if spec.values_in_keys else of_query_heads(stored(values, spec.kv_dtype))
        key_at = torch.arange(before + new).unsqueeze(0)
        for tile in range(before, before + new, _QUERY_TILE):
            at = torch.arange(tile, min(tile + _QUERY_TILE, before + new)).unsqueeze(1)
            query = case.query[start : start + len(at)].double()
            start += len(at)
            scores = torch.einsum("qhd,khd->hqk", query, k) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            last = at
            if case.visible_lens is not None and not variant.without_spans:
                last = torch.from_numpy(case.visible_lens[r][tile : tile + len(at)]).unsqueeze(1) - 1
            visible = key_at <= last + variant.future
            if spec.sliding_window is not None:
                in_window = key_at > at - spec.sliding_window
                visible &= in_window | (last > at) if variant.spans_without_window else in_window
            if variant.only_new:
                visible &= key_at >= before
            scores = scores.masked_fill(~visible, -math.inf)
            if case.sinks is not None and not variant.without_sinks:
                extra = case.sinks.double().view(-1, 1, 1).expand(-1, len(at), 1)
                scores = torch.cat([scores, extra], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : before + new]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return torch.cat(outputs)


class CacheHarness:
    """The KV cache of one layer on a device, with methods to fill and read it.

    Args:
        backend: The backend.
        runtime: The bound device.
        num_blocks: Blocks of the cache.
        block_size: Tokens per block.
    """

    def __init__(self, backend: AttentionBackend, runtime: DeviceRuntime, num_blocks: int, block_size: int) -> None:
        self.backend, self.runtime = backend, runtime
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv = backend.allocate(num_blocks, block_size, runtime.device)

    def on_device(self, layout: BatchLayout) -> BatchLayout:
        """The layout with its device arrays on the device."""
        arrays: dict[str, Any] = {f"{name}_device": self.runtime.from_numpy(getattr(layout, name)) for name in _ARRAYS}
        if layout.visible_lens is not None:
            arrays["visible_lens_device"] = self.runtime.from_numpy(layout.visible_lens)
        return dataclasses.replace(layout, **arrays)

    def begin_step(self, layout: BatchLayout) -> Any:
        """Starts a step: calls `step_mark` and builds the metadata."""
        self.runtime.step_mark()
        return self.backend.build_metadata(self.on_device(layout))

    def write(self, layout: BatchLayout, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Stores keys and values from the host; returns the step's metadata."""
        metadata = self.begin_step(layout)
        # Views of one projection, as models pass them.
        fused = self.runtime.to_device(torch.cat([keys.flatten(1), values.flatten(1)], dim=1))
        size = keys.shape[1] * keys.shape[2]
        key = fused[:, :size].view(keys.shape)
        in_keys = self.backend.spec.values_in_keys
        value = key[..., : values.shape[2]] if in_keys else fused[:, size:].view(values.shape)
        self.backend.write_kv(self.kv, key, value, metadata)
        return metadata

    def fill(self, value: float) -> None:
        """Writes `value` to every slot of the cache."""
        self.backend.fill(self.kv, value)

    def mean_of_visible_values(self, blocks: Sequence[int], length: int, *, as_prompt: bool = False) -> torch.Tensor:
        """Reads the values that attention sees in some blocks, for a request of `length` tokens.

        Queries of zero weigh all visible keys equally: the result at position p is the mean of the values at [0, p].
        Each position is a separate decode request, or all are one prompt.

        Returns:
            float64 [length, num_kv_heads, value_size], on the host.
        """
        spec, dtype = self.backend.spec, torch_dtype(self.backend.spec.dtype)
        requests = [(0, length)] if as_prompt else [(position, 1) for position in range(length)]
        table = np.full((len(requests), len(blocks) + 1), OUT_OF_RANGE, dtype=np.int32)
        table[:, : len(blocks)] = blocks
        metadata = self.begin_step(make_layout(requests, table, self.block_size))
        query = self.runtime.to_device(torch.zeros(length, spec.num_heads, spec.head_size, dtype=dtype))
        answer = self.runtime.to_host(self.backend.forward(query, self.kv, metadata)).wait().double()
        heads = answer.view(length, spec.num_heads, spec.value_size)
        return heads[:, :: spec.num_heads // spec.num_kv_heads]


def run(
    backend: AttentionBackend,
    runtime: DeviceRuntime,
    case: Case,
    *,
    poison: float | None = None,
    move_blocks: bool = False,
    contiguous: bool = False,
) -> torch.Tensor:
    """Stores the cached tokens, runs the step, and returns its result on the host.

    Args:
        poison, move_blocks: As in `store`.
        contiguous: Whether queries are contiguous; by default they are a view with strides.
    """
    harness, metadata, query = store(backend, runtime, case, poison=poison, move_blocks=move_blocks)
    if contiguous:
        query = query.contiguous()
    sinks = None if case.sinks is None else runtime.to_device(case.sinks)
    found = backend.forward(query, harness.kv, metadata, sinks)
    return runtime.to_host(found).wait()


def store(
    backend: AttentionBackend,
    runtime: DeviceRuntime,
    case: Case,
    *,
    poison: float | None = None,
    move_blocks: bool = False,
) -> tuple[CacheHarness, Any, torch.Tensor]:
    """Stores the cached tokens and those of the step.

    Args:
        poison: Initial value of every slot; None leaves a new cache as it is.
        move_blocks: Store the cached tokens in other blocks, then copy these to the blocks of the block table.

    Returns:
        The cache, the metadata of the step, and its queries on the device.
    """
    harness = CacheHarness(backend, runtime, case.num_blocks * (2 if move_blocks else 1), case.layout.block_size)
    if poison is not None:
        harness.fill(poison)
    rows = [r for r, (before, _) in enumerate(case.requests) if before]
    if rows:
        tables = case.layout.block_table[rows].copy()
        tables[tables < OUT_OF_RANGE] += case.num_blocks if move_blocks else 0
        earlier = make_layout([(0, case.requests[r][0]) for r in rows], tables, harness.block_size)
        parts = [torch.cat([whole[r][: case.requests[r][0]] for r in rows]) for whole in (case.keys, case.values)]
        harness.write(earlier, parts[0], parts[1])
        if move_blocks:
            blocks = torch.arange(case.num_blocks)
            backend.copy_blocks(harness.kv, runtime.to_device(blocks + case.num_blocks), runtime.to_device(blocks))
    new = []
    for whole in (case.keys, case.values):
        fresh = [one[before:] for one, (before, _) in zip(whole, case.requests, strict=True)]
        padding = case.layout.num_tokens - case.num_real_tokens
        new.append(torch.cat([*fresh, torch.full((padding, *whole[0].shape[1:]), 0.5).to(whole[0].dtype)]))
    metadata = harness.write(case.layout, new[0], new[1])
    # A strided view, like the split of a fused projection.
    flat = case.query.flatten(1)
    fused = runtime.to_device(torch.cat([flat, torch.zeros_like(flat)], dim=1))
    query = fused[:, : flat.shape[1]].view(case.query.shape)
    return harness, metadata, query
