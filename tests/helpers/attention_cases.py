"""Batches for tests of attention backends, driven through the public contract only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.platform.attention import AttentionBackend, AttentionSpec, BatchLayout
from mvllm.platform.runtime import DeviceRuntime

HOST = torch.device("cpu")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Case:
    """A batch of requests with everything known about them.

    Attributes:
        spec: The attention layer.
        requests: (tokens computed before, new tokens) of each.
        layout: The step as core describes it.
        keys, values: Per request, the whole sequence: [seq_len, num_kv_heads, head_size or value_size], compute dtype.
        query: [T, num_heads, head_size], a strided view as a split of a fused projection gives.
        sinks: [num_heads] or None.
    """

    spec: AttentionSpec
    requests: list[tuple[int, int]]
    layout: BatchLayout
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    sinks: torch.Tensor | None
    num_blocks: int
    device: torch.device = HOST

    def on(self, runtime: DeviceRuntime) -> Case:
        """The same case with its tensors on a device."""
        layout = self.layout
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        arrays = {f"{name}_device": runtime.from_numpy(getattr(layout, name)) for name in names}
        return dataclasses.replace(
            self,
            layout=dataclasses.replace(layout, **arrays),
            keys=[runtime.to_device(k) for k in self.keys],
            values=[runtime.to_device(v) for v in self.values],
            query=runtime.to_device(self.query),
            sinks=None if self.sinks is None else runtime.to_device(self.sinks),
            device=runtime.device,
        )


def make_layout(
    requests: Sequence[tuple[int, int]], tables: np.ndarray, block_size: int, slots: np.ndarray | None = None
) -> BatchLayout:
    lengths = [new for _, new in requests]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.array([before + new for before, new in requests], dtype=np.int32)
    if slots is None:
        slots = np.array(
            [
                tables[r, t // block_size] * block_size + t % block_size
                for r, (before, new) in enumerate(requests)
                for t in range(before, before + new)
            ],
            dtype=np.int32,
        )
    arrays = (starts, seq_lens, tables, slots)
    return BatchLayout(
        len(requests),
        int(starts[-1]),
        max(lengths),
        int(seq_lens.max()),
        block_size,
        *arrays,
        *(torch.from_numpy(array) for array in arrays),
    )


def make_case(
    spec: AttentionSpec,
    requests: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    seed: int = 0,
    spread: float = 1.0,
) -> Case:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[spec.dtype]
    needs = [-(-(before + new) // block_size) for before, new in requests]
    num_blocks = sum(needs) + 3
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(requests), max(needs) + 2), 10**6, dtype=np.int32)  # past the end: must never be followed
    for r, need in enumerate(needs):
        tables[r, :need], ids = ids[:need], ids[need:]

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    keys = [random(before + new, spec.num_kv_heads, spec.head_size) for before, new in requests]
    if spec.values_in_keys:
        values = [key[..., : spec.value_size] for key in keys]
    else:
        values = [random(before + new, spec.num_kv_heads, spec.value_size) for before, new in requests]
    num_tokens = sum(new for _, new in requests)
    fused = random(num_tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size)
    return Case(
        spec=spec,
        requests=list(requests),
        layout=make_layout(requests, tables, block_size),
        keys=keys,
        values=values,
        query=fused[:, : spec.num_heads * spec.head_size].view(num_tokens, spec.num_heads, spec.head_size),
        sinks=random(spec.num_heads) if spec.sinks else None,
        num_blocks=num_blocks,
    )


def run(backend: AttentionBackend, case: Case, *, poison: bool = True, move_blocks: bool = False) -> torch.Tensor:
    """Fills the cache as earlier steps would have, then runs the step.

    Args:
        poison: An earlier tenant of every block left NaN in all its slots.
        move_blocks: Earlier tokens were stored in other blocks and copied to where the block table says.
    """
    block_size, device = case.layout.block_size, case.device
    kv = backend.allocate(2 * case.num_blocks, block_size, device)

    def write(layout: BatchLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        backend.write_kv(kv, keys, values, backend.build_metadata(_layout_on(layout, device)))

    if poison:
        num_blocks = case.num_blocks * (2 if move_blocks else 1)
        everything = make_layout(
            [(0, num_blocks * block_size)], np.arange(num_blocks, dtype=np.int32)[None], block_size
        )
        write(
            everything,
            *(
                torch.full((num_blocks * block_size, *one.shape[1:]), torch.nan, dtype=case.query.dtype, device=device)
                for one in (case.keys[0], case.values[0])
            ),
        )
    rows = [r for r, (before, _) in enumerate(case.requests) if before]
    if rows:
        tables = case.layout.block_table[rows] + (case.num_blocks if move_blocks else 0)
        earlier = make_layout([(0, case.requests[r][0]) for r in rows], tables, block_size)
        keys, values = (
            torch.cat([whole[r][: case.requests[r][0]] for r in rows]) for whole in (case.keys, case.values)
        )
        write(earlier, keys, values)
        if move_blocks:
            blocks = torch.arange(case.num_blocks, device=device)
            backend.copy_blocks(kv, blocks + case.num_blocks, blocks)
    keys, values = (
        torch.cat([one[before:] for one, (before, _) in zip(whole, case.requests)])
        for whole in (case.keys, case.values)
    )
    fused, size = torch.cat([keys.flatten(1), values.flatten(1)], dim=1), keys.shape[1] * keys.shape[2]
    metadata = backend.build_metadata(case.layout)
    backend.write_kv(kv, fused[:, :size].view(keys.shape), fused[:, size:].view(values.shape), metadata)
    return backend.forward(case.query, kv, metadata, case.sinks)


def _layout_on(layout: BatchLayout, device: torch.device) -> BatchLayout:
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    arrays = {f"{name}_device": torch.from_numpy(getattr(layout, name)).to(device) for name in names}
    return dataclasses.replace(layout, **arrays)


def make_spec(
    num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 64, dtype: str = "float32", **fields
) -> AttentionSpec:
    fields.setdefault("kv_dtype", dtype)
    fields.setdefault("scale", 1 / math.sqrt(head_size))
    return AttentionSpec(num_heads, num_kv_heads, head_size, dtype, **fields)
