"""KVL: the KV cache of a layer has the announced size, and stores and copies exactly the given keys and values."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from mvllm.extension_api.testing import checked_attention_backend, tensors_of, torch_dtype
from mvllm.plugin_api import AttentionBackend, DeviceRuntime, PlatformError
from mvllm_conformance.attention_cases import CacheHarness, make_case, make_layout, make_spec, run, stored, tolerance
from mvllm_conformance.markers import clause, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_close, assert_equal

NUM_BLOCKS = 6


def make_harness(
    subject: PlatformUnderTest, runtime: DeviceRuntime, dtype: str, num_blocks: int = NUM_BLOCKS
) -> CacheHarness:
    # One query head for each key/value head. Shared heads are the subject of ATT-04.
    backend = checked_attention_backend(subject.platform, make_spec(2, 2, 64, dtype))
    return CacheHarness(backend, runtime, num_blocks, backend.kv_layout().block_sizes[0])


def contents(harness: CacheHarness) -> list[torch.Tensor]:
    """The contents of the cache, on the host."""
    try:
        slots = torch.arange(harness.num_blocks * harness.block_size)
        parts = list(harness.backend.read_slots(harness.kv, slots))
    except PlatformError:
        # The layout of a contract 1.0 backend's tensors may be unknown.
        whole = tensors_of(harness.kv)
        if whole is None:
            raise
        return [harness.runtime.to_host(part).wait().clone() for part in whole]
    assert parts, "read_slots returned nothing"
    for part in parts:
        assert part.shape[0] == len(slots), f"read_slots returned {tuple(part.shape)} for {len(slots)} slots"
    return [harness.runtime.to_host(part).wait().clone() for part in parts]


def assert_same(before: list[torch.Tensor], after: list[torch.Tensor], what: str) -> None:
    """Fails if contents differ, and names the slots. NaN equals NaN."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        differing = ~((old == new) | ((old != old) & (new != new)))
        if differing.any():
            places = differing.nonzero()[:, 0].unique().tolist()
            raise AssertionError(f"{what} changed {places[:8]} along the first dimension of part {index} of the cache")


def random_kv(backend: AttentionBackend, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    spec = backend.spec
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, spec.num_kv_heads, spec.head_size)
    dtype = torch_dtype(spec.dtype)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


@clause("KVL-01")
def test_a_layout_names_block_sizes_and_bytes(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    backend = checked_attention_backend(subject.platform, make_spec(dtype=claimed_dtype))
    layout = backend.kv_layout()
    assert layout == backend.kv_layout(), "kv_layout must be pure"
    assert layout.block_sizes and all(type(size) is int and size > 0 for size in layout.block_sizes)
    assert len(set(layout.block_sizes)) == len(layout.block_sizes)
    spec = backend.spec
    assert layout.bytes_per_token > 0
    assert layout.bytes_per_token <= 16 * spec.num_kv_heads * max(spec.head_size, 128) * 8, (
        "bytes_per_token is implausibly large"
    )


@clause("KVL-02")
def test_a_cache_takes_the_bytes_that_the_layout_says(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    specs = [make_spec(dtype=claimed_dtype)]
    specs += [make_spec(dtype=claimed_dtype, kv_dtype=kv_dtype) for kv_dtype in subject.capabilities.kv_dtypes]
    if subject.capabilities.mla:
        specs += [replace(spec, num_kv_heads=1, value_head_size=48, values_in_keys=True) for spec in specs]
    for spec in specs:
        try:
            backend = checked_attention_backend(subject.platform, spec)
        except PlatformError:
            assert spec.kv_dtype != claimed_dtype  # combinations of dtypes are the subject of ATT-07
            continue
        harness = CacheHarness(backend, bound_device, 64, backend.kv_layout().block_sizes[0])
        taken = backend.kv_bytes(harness.kv)
        announced = 64 * harness.block_size * backend.kv_layout().bytes_per_token
        assert announced == pytest.approx(taken, rel=0.02), (
            f"{spec}: kv_layout gives {announced} bytes, the cache takes {taken}"
        )


@clause("KVL-02")
def test_a_new_cache_is_finite(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str) -> None:
    for part in contents(make_harness(subject, bound_device, claimed_dtype)):
        places = (~torch.isfinite(part.float())).nonzero()[:1].tolist() if part.is_floating_point() else []
        assert not places, f"a new cache holds {part[tuple(places[0])]} at {places[0]} of {tuple(part.shape)}"


@clause("KVL-05")
def test_each_slot_gives_back_the_value_it_was_given(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for kv_dtype in subject.capabilities.kv_dtypes:
        spec = make_spec(2, 2, 64, claimed_dtype, kv_dtype=kv_dtype)
        try:
            backend = checked_attention_backend(subject.platform, spec)
        except Exception:  # noqa: BLE001  (combinations of dtypes are the subject of ATT-07)
            assert kv_dtype != claimed_dtype
            continue
        harness = CacheHarness(backend, bound_device, NUM_BLOCKS, backend.kv_layout().block_sizes[0])
        keys, values = random_kv(backend, NUM_BLOCKS)
        # One token at the start of each block, each a separate request that sees only itself.
        layout = make_layout([(0, 1)] * NUM_BLOCKS, np.arange(NUM_BLOCKS, dtype=np.int32)[:, None], harness.block_size)
        harness.write(layout, keys, values)
        rounded = stored(values, kv_dtype)
        # Backends may round ties in 8 bits differently: one step of int8 or float8_e4m3fn.
        largest = float(values.abs().max())
        tie_error = {"int8": (0.0, largest / 127), "float8_e4m3fn": (1 / 8, largest / 2**17)}.get(kv_dtype, (0.0, 0.0))
        for block in range(NUM_BLOCKS):
            seen = harness.mean_of_visible_values([block], 1)[0]
            step = float(torch.finfo(torch_dtype(claimed_dtype)).eps)
            allowed = (step + tie_error[0]) * rounded[block].abs() + step + tie_error[1]
            what = f"the value at the start of block {block}, stored as {kv_dtype}, by head and element"
            assert_close(seen, rounded[block], allowed, what)


@clause("KVL-05")
def test_a_sequence_written_in_pieces_reads_as_one(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    harness = make_harness(subject, bound_device, claimed_dtype)
    length, order = 2 * harness.block_size + 5, [4, 1, 3]
    keys, values = random_kv(harness.backend, length)
    table = np.array([order], dtype=np.int32)
    cuts = [0, 3, harness.block_size, harness.block_size + 1, length]
    for begin, end in pairwise(cuts):
        layout = make_layout([(begin, end - begin)], table, harness.block_size)
        harness.write(layout, keys[begin:end], values[begin:end])
    means = values.double().cumsum(0) / torch.arange(1, length + 1).view(-1, 1, 1)
    what = f"means of the values at [0, position], by position and head, written in pieces that begin at {cuts[:-1]}"
    assert_close(harness.mean_of_visible_values(order, length), means, tolerance(claimed_dtype, claimed_dtype), what)


@clause("KVL-03")
def test_slots_of_minus_one_store_nothing(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    harness = make_harness(subject, bound_device, claimed_dtype)
    harness.fill(0.25)
    before = contents(harness)
    keys, values = random_kv(harness.backend, 9)
    table = np.array([[2]], dtype=np.int32)
    layout = make_layout([(0, 1)], table, harness.block_size, padding=8)
    if subject.capabilities.stores_by_block_table:
        # The slot of a token cannot be -1: a step of padding alone.
        harness.write(make_layout([], table[:0], harness.block_size, padding=9, padding_requests=1), keys, values)
    else:
        layout.slot_mapping[:] = -1
        harness.write(layout, keys, values)
    assert_same(before, contents(harness), "a step whose slots are all -1")
    # `contents` must show a write, otherwise the comparison above would always succeed.
    layout.slot_mapping[0] = 2 * harness.block_size
    harness.write(layout, keys, values)
    assert any(not torch.equal(old, new) for old, new in zip(before, contents(harness), strict=True)), (
        "read_slots returns the same before and after a token was stored in slot "
        f"{2 * harness.block_size}: it must return the contents of the slots"
    )


@clause("KVL-03")
def test_a_write_touches_no_slot_that_it_was_not_given(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    harness = make_harness(subject, bound_device, claimed_dtype)
    size = harness.block_size
    harness.fill(0.25)
    others = [block for block in range(NUM_BLOCKS) if block != 2]
    untouched = [harness.mean_of_visible_values([block], size) for block in others]
    keys, values = random_kv(harness.backend, 8)
    # Three tokens in the middle of block 2, and five of padding.
    first, length = min(2, size - 1), min(3, size - min(2, size - 1))
    layout = make_layout([(first, length)], np.array([[2]], dtype=np.int32), size, padding=8 - length)
    harness.write(layout, keys, values)
    for block, before in zip(others, untouched, strict=True):
        assert_equal(harness.mean_of_visible_values([block], size), before, f"block {block}, which was not written")
    old = torch.full((size, *values.shape[1:]), 0.25, dtype=torch.float64)
    end = first + length
    known = end if subject.capabilities.stores_by_block_table else size
    sums = torch.cat([old[:first], values[:length].double(), old[end:]])[:known].cumsum(0)
    seen = harness.mean_of_visible_values([2], known)
    means = sums / torch.arange(1, known + 1).view(-1, 1, 1)
    what = f"means of the values at [0, position] of a block whose slots {first} to {end - 1} were written"
    assert_close(seen, means, tolerance(claimed_dtype, claimed_dtype), what)


def skip_default_copy_blocks(backend: AttentionBackend) -> None:
    """Skips a test of `copy_blocks` if the backend inherits the default, which core's tests cover."""
    if type(backend).copy_blocks is AttentionBackend.copy_blocks:
        skip_not_claimed("copy_blocks")


@clause("KVL-04")
def test_blocks_are_copied_whole_and_alone(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    harness = make_harness(subject, bound_device, claimed_dtype)
    skip_default_copy_blocks(harness.backend)
    size = harness.block_size
    length = NUM_BLOCKS * size
    keys, values = random_kv(harness.backend, length)
    harness.write(make_layout([(0, length)], np.arange(NUM_BLOCKS, dtype=np.int32)[None], size), keys, values)
    before = [harness.mean_of_visible_values([block], size) for block in range(NUM_BLOCKS)]
    source, destination = (bound_device.to_device(torch.tensor(ids, dtype=torch.int64)) for ids in ([0, 3], [5, 1]))
    harness.backend.copy_blocks(harness.kv, source, destination)
    after = [harness.mean_of_visible_values([block], size) for block in range(NUM_BLOCKS)]
    for block, source_block in enumerate([0, 3, 2, 3, 4, 0]):
        assert_equal(
            after[block], before[source_block], f"block {block}, which must equal the former block {source_block}"
        )


@clause("KVL-04")
def test_attention_over_copied_blocks_is_the_same(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    spec = make_spec(2, 2, 64, claimed_dtype)
    backend = checked_attention_backend(subject.platform, spec)
    skip_default_copy_blocks(backend)
    case = make_case(spec, [(40, 1), (17, 1)], block_size=backend.kv_layout().block_sizes[0])
    # Compared with attention over blocks that were not copied: what attention itself must give is the subject of ATT.
    moved, straight = (run(backend, bound_device, case, move_blocks=moved) for moved in (True, False))
    what = "attention over copied blocks, compared with attention over the blocks themselves, by token and element"
    rows, allowed = case.num_real_tokens, tolerance(claimed_dtype, claimed_dtype)
    finite = torch.isfinite(straight[:rows])
    assert_close(moved[:rows][finite], straight[:rows][finite], allowed, what)
