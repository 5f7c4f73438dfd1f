"""KVT: blocks and states are copied to host memory as bytes, and back, exactly and in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from mvllm.extension_api.kv_transfer import HostKVCache
from mvllm.extension_api.testing import (
    SCHEMAS,
    CopiedRows,
    HostBlocks,
    check_kv_transfer,
    checked_attention_backend,
    checked_state_backend,
    torch_dtype,
)
from mvllm.plugin_api import AttentionSpec, BlockTransfer, ConfigError, DeviceRuntime, PlatformError, SchedulerOutput
from mvllm_conformance.attention_cases import CacheHarness, make_layout, make_spec
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.state_steps import Piece, StateCase, StateHarness, step_cases

NUM_BLOCKS = 6
NUM_SLOTS = 5


def specs(subject: PlatformUnderTest, dtype: str) -> Iterator[AttentionSpec]:
    """The kinds of caches that the platform claims."""
    claimed = subject.capabilities
    plain = [make_spec(2, 2, 64, dtype, kv_dtype=kv_dtype) for kv_dtype in claimed.kv_dtypes]
    latent = [replace(spec, num_kv_heads=1, value_head_size=48, values_in_keys=True) for spec in plain]
    indexed = [
        replace(spec, index_topk=8, indexer=indexer, value_head_size=64 if indexer else 48, scale=1.0)
        for spec in latent
        for indexer in (True, False)
    ]
    every = plain + latent * claimed.mla + indexed * claimed.sparse_attention
    for spec in every:
        try:
            checked_attention_backend(subject.platform, spec)
        except PlatformError:
            assert spec.kv_dtype != dtype, spec  # combinations of dtypes are the subject of ATT-07
            continue
        yield spec


def harness_of(subject: PlatformUnderTest, runtime: DeviceRuntime, spec: AttentionSpec) -> CacheHarness:
    """A cache of NUM_BLOCKS blocks."""
    backend = checked_attention_backend(subject.platform, spec)
    return CacheHarness(backend, runtime, NUM_BLOCKS, backend.kv_layout().block_sizes[0])


def write(harness: CacheHarness, blocks: Sequence[int], seed: int) -> None:
    """Stores random keys and values in all slots of blocks."""
    spec, length = harness.backend.spec, len(blocks) * harness.block_size
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(spec.dtype)
    keys = torch.randn((length, spec.num_kv_heads, spec.head_size), generator=generator).to(dtype)
    values = torch.randn((length, spec.num_kv_heads, spec.value_size), generator=generator).to(dtype)
    if spec.values_in_keys:
        values = keys[..., : spec.value_size]
    harness.write(make_layout([(0, length)], np.array([blocks], np.int32), harness.block_size), keys, values)


def done(transfer: BlockTransfer | None) -> None:
    """Waits for a copy, if it is not done."""
    if transfer is not None:
        transfer.wait()


def exported(harness: CacheHarness, blocks: Sequence[int]) -> np.ndarray:
    """The bytes of blocks: uint8 [n, bytes of a block]."""
    out = rows_for(harness, len(blocks))
    done(harness.backend.export_blocks(harness.kv, np.array(blocks, np.int64), out))
    return out


def rows_for(harness: CacheHarness, count: int) -> np.ndarray:
    """An array for the bytes of blocks, with other contents."""
    return np.full((count, harness.block_size * harness.backend.kv_layout().bytes_per_token), 0xA5, np.uint8)


def contents(harness: CacheHarness) -> list[torch.Tensor]:
    """The contents of each block as `read_slots` shows them, on the host: [NUM_BLOCKS, block_size, ...] bytes."""
    slots = torch.arange(NUM_BLOCKS * harness.block_size)
    parts = [harness.runtime.to_host(part).wait().clone() for part in harness.backend.read_slots(harness.kv, slots)]
    return [part.contiguous().view(torch.uint8).view(NUM_BLOCKS, harness.block_size, -1) for part in parts]


def assert_blocks(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], sources: Sequence[int], what: object
) -> None:
    """Fails unless each block has the former contents of the block in `sources`."""
    for block, source in enumerate(sources):
        for old, new in zip(before, after, strict=True):
            wrong = int((old[source] != new[block]).sum())
            assert not wrong, (
                f"{what}: block {block} must have the former contents of block {source}; {wrong} of "
                f"{new[block].numel()} bytes differ"
            )


@clause("KVT-01")
def test_blocks_that_come_back_have_the_same_contents(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for spec in specs(subject, claimed_dtype):
        harness = harness_of(subject, bound_device, spec)
        write(harness, range(NUM_BLOCKS), 0)
        before, data = contents(harness), exported(harness, [4, 0, 3])
        write(harness, range(NUM_BLOCKS), 1)
        done(harness.backend.import_blocks(harness.kv, np.array([2, 4, 0], np.int64), data))
        after = contents(harness)
        for index, source in ((2, 4), (4, 0), (0, 3)):
            for old, new in zip(before, after, strict=True):
                wrong = int((old[source] != new[index]).sum())
                assert not wrong, (
                    f"{spec}: block {source} was exported and imported as block {index}; {wrong} of "
                    f"{new[index].numel()} bytes of its contents differ"
                )
        assert np.array_equal(exported(harness, [2, 4, 0]), data), f"{spec}: the bytes of imported blocks differ"


@clause("KVT-01")
def test_another_cache_imports_the_blocks(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    """Attention over imported blocks has the bits of attention over the blocks that were exported."""
    spec = make_spec(2, 2, 64, claimed_dtype)
    source, target = harness_of(subject, bound_device, spec), harness_of(subject, bound_device, spec)
    write(source, range(NUM_BLOCKS), 0)
    target.fill(float("nan"))
    done(target.backend.import_blocks(target.kv, np.array([5, 1], np.int64), exported(source, [0, 3])))
    length = 2 * source.block_size
    found = target.mean_of_visible_values([5, 1], length)
    assert torch.equal(found, source.mean_of_visible_values([0, 3], length)), "attention over imported blocks differs"


@clause("KVT-02")
def test_copies_change_no_other_block(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for spec in specs(subject, claimed_dtype):
        harness = harness_of(subject, bound_device, spec)
        write(harness, range(NUM_BLOCKS), 0)
        before = contents(harness)
        data = exported(harness, [1, 5])
        assert_blocks(before, contents(harness), range(NUM_BLOCKS), f"{spec}: after export_blocks")
        kept = data.copy()
        done(harness.backend.import_blocks(harness.kv, np.array([3, 2], np.int64), data))
        assert np.array_equal(data, kept), f"{spec}: import_blocks changed its argument"
        assert_blocks(before, contents(harness), [0, 1, 5, 1, 4, 5], f"{spec}: after import_blocks")


@clause("KVT-03")
def test_copies_are_in_the_order_of_the_calls(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    """Nothing waits between the calls, as in a step."""
    spec = make_spec(2, 2, 64, claimed_dtype)
    harness = harness_of(subject, bound_device, spec)
    size = harness.block_size
    write(harness, [0, 1, 2], 0)
    first = harness.mean_of_visible_values([1], size)
    write(harness, [1], 1)
    second, data = harness.mean_of_visible_values([1], size), rows_for(harness, 1)
    block = np.array([1], np.int64)
    export = harness.backend.export_blocks(harness.kv, block, data)
    write(harness, [0, 1, 2], 0)
    assert torch.equal(harness.mean_of_visible_values([1], size), first)
    done(export)
    replaced = harness.backend.import_blocks(harness.kv, block, data)
    found = harness.mean_of_visible_values([1], size)
    assert torch.equal(found, second), "forward after import_blocks, or an export before a write, has other contents"
    done(replaced)
    write(harness, [0, 1, 2], 0)
    assert torch.equal(harness.mean_of_visible_values([1], size), first), "a write after import_blocks was lost"


class OneCache:
    """The layers of a rank that are one cache, for HostBlocks."""

    def __init__(self, harness: CacheHarness) -> None:
        backend, kv = harness.backend, harness.kv
        self._rows = CopiedRows(
            rows_for(harness, 0).shape[1],
            lambda: "",
            lambda blocks, out: backend.export_blocks(kv, blocks, out),
            lambda blocks, data: backend.import_blocks(kv, blocks, data),
        )

    def copied_blocks(self, block_size: int) -> Sequence[CopiedRows]:
        return [self._rows]

    def copied_slots(self) -> Sequence[CopiedRows]:
        return ()


@clause("KVT-03")
def test_a_step_loads_a_block_that_the_step_before_it_has_saved(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    """As with asynchronous scheduling: the copies of a step are waited for when later steps have been submitted."""
    harness = harness_of(subject, bound_device, make_spec(2, 2, 64, claimed_dtype))
    write(harness, range(NUM_BLOCKS), 0)
    before = contents(harness)
    host = HostBlocks(0, OneCache(harness), harness.block_size)
    memory = HostKVCache(NUM_BLOCKS, [rows_for(harness, 0).shape[1]])
    host.map(memory.path, memory.num_blocks, memory.rank_bytes, "", 0, [])
    steps = [host.start(SchedulerOutput(step=0, saved_blocks=[4, 0], saved_host_blocks=[1, 2]))]
    write(harness, [4, 0], 1)
    steps.append(host.start(SchedulerOutput(step=1, saved_blocks=[1, 3], saved_host_blocks=[5, 0])))
    write(harness, [1, 3], 2)
    steps.append(
        host.start(
            SchedulerOutput(
                step=2, saved_blocks=[5], saved_host_blocks=[3], loaded_blocks=[3, 5], loaded_host_blocks=[1, 0]
            )
        )
    )
    steps.append(host.start(SchedulerOutput(step=3, loaded_blocks=[1, 4, 0], loaded_host_blocks=[3, 5, 2])))
    assert_blocks(before, contents(harness), [0, 5, 2, 4, 1, 3], "copies of four steps that were not waited for")
    for step in steps:
        step.wait()
    saved = {1: 4, 2: 0, 5: 1, 0: 3, 3: 5}
    for index, wanted in zip(saved, exported(harness, [3, 0, 4, 5, 1]), strict=True):
        assert np.array_equal(memory.block(index), wanted), f"the array of block {saved[index]} has other bytes"


@clause("KVT-04")
def test_formats_name_what_the_bytes_depend_on(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    found: dict[str, tuple[object, ...]] = {}
    every = [*specs(subject, claimed_dtype), make_spec(2, 1, 64, claimed_dtype), make_spec(2, 2, 32, claimed_dtype)]
    for spec in every:
        backend = checked_attention_backend(subject.platform, spec)
        for size in backend.kv_layout().block_sizes[:2]:
            names = {backend.block_format(backend.allocate(count, size, bound_device.device), size) for count in (2, 5)}
            assert len(names) == 1, f"the format depends on the number of blocks: {sorted(names)}"
            [name] = names
            assert name, f"{spec}: the format is empty"
            stored = (spec.kv_dtype, spec.num_kv_heads, spec.head_size, spec.values_in_keys, size)
            other = found.setdefault(name, stored)
            assert other == stored, (
                f"Storage dtype, heads, head size, values in keys and block size {other} and {stored} have the same "
                f"format, {name!r}"
            )


def state_cases(dtype: str) -> list[StateCase]:
    return [case for op in sorted(SCHEMAS) for case in step_cases(op, dtype)]


@clause("KVT-05", needs="state")
def test_states_that_come_back_have_the_same_contents(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str
) -> None:
    for case in state_cases(claimed_dtype):
        harness = StateHarness(subject, bound_device, case, NUM_SLOTS)
        for slot in range(NUM_SLOTS):
            harness.run([case.draw(3, slot)], [Piece(0, slice(0, 3), -1, slot)])
        before = harness.contents()
        data = np.full((2, case.spec.bytes_per_sequence), 0xA5, np.uint8)
        done(harness.backend.export_slots(harness.state, np.array([4, 1], np.int64), data))
        assert torch.equal(harness.contents(), before), f"{case}: export_slots changed a state"
        # The state of slot 4 before this step is that of the export.
        harness.run([case.draw(3, 9)], [Piece(0, slice(0, 3), -1, 4)])
        last = harness.contents()[4]
        done(harness.backend.import_slots(harness.state, np.array([0, 3], np.int64), data))
        wanted = torch.stack([before[4], before[1], before[2], before[1], last])
        after = harness.contents()
        wrong = [slot for slot in range(NUM_SLOTS) if not torch.equal(after[slot], wanted[slot])]
        assert not wrong, f"{case}: slots {wrong} have other contents after export_slots and import_slots"


@clause("KVT-05", needs="state")
def test_formats_of_states_differ(subject: PlatformUnderTest, bound_device: DeviceRuntime, claimed_dtype: str) -> None:
    wanted = {case.spec for case in state_cases(claimed_dtype)}
    formats = {checked_state_backend(subject.platform, spec).slot_format() for spec in wanted}
    assert all(formats) and len(formats) == len(wanted), f"{len(wanted)} kinds of states have formats {sorted(formats)}"


@clause("KVT-01", "KVT-02", "KVT-03", "KVT-04", "KVT-05", refusal=True)
def test_copies_that_are_not_claimed_are_refused(subject: PlatformUnderTest) -> None:
    with pytest.raises(ConfigError, match=r"Capabilities\.kv_transfer"):
        check_kv_transfer(subject.platform)
