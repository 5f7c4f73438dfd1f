"""The order of a step's copies, and when asynchronous ones are waited for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mvllm.errors import CacheError
from mvllm.kv_transfer.host_kv_cache import HostKVCache
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.worker.host_blocks import CopiedRows, HostBlocks

NUM_BYTES = (3, 5)
NUM_HOST = 6


class Transfer:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class Layers:
    """Two caches on a device whose copies to the host are done when they are waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.has_states = False
        rows = np.arange(8, dtype=np.uint8)[:, None]
        self.caches = [np.repeat(rows + 10 * i, size, 1) for i, size in enumerate(NUM_BYTES, 1)]

    def copied_blocks(self, block_size: int) -> list[CopiedRows]:
        return [self._part(i, size) for i, size in enumerate(NUM_BYTES)]

    def copied_slots(self) -> list[CopiedRows]:
        return [self._part(i, size) for i, size in enumerate(NUM_BYTES)] if self.has_states else []

    def _part(self, i: int, size: int) -> CopiedRows:
        def save(blocks: np.ndarray, out: np.ndarray) -> Transfer:
            taken = self.caches[i][blocks]  # in the device's order
            self.log.append(f"save {i}")

            def finish() -> None:
                self.log.append(f"wait {i}")
                out[:] = taken

            return Transfer(finish)

        def load(blocks: np.ndarray, data: np.ndarray) -> None:
            self.log.append(f"load {i}")
            self.caches[i][blocks] = data

        return CopiedRows(size, lambda: f"format {i}", save, load)


@pytest.fixture
def layers() -> Layers:
    return Layers()


@pytest.fixture
def host() -> HostKVCache:
    return HostKVCache(NUM_HOST, [2, sum(NUM_BYTES), 4])


@pytest.fixture
def blocks(layers: Layers, host: HostKVCache) -> HostBlocks:
    """Those of rank 1."""
    made = HostBlocks(1, layers, 16)
    made.map(host.path, host.num_blocks, host.rank_bytes, "", 0, [])
    return made


def test_a_rank_has_its_part_of_a_host_block(layers: Layers, host: HostKVCache, blocks: HostBlocks) -> None:
    needs = blocks.needs()
    assert (needs.block_bytes, needs.state_bytes) == (8, 0)
    assert needs.block_format == "format 0\nformat 1"
    copies = blocks.start(SchedulerOutput(step=0, saved_blocks=[3, 7], saved_host_blocks=[4, 1]))
    copies.wait()
    assert host.block(4).tolist() == [0, 0, *[13] * 3, *[23] * 5, 0, 0, 0, 0]
    assert host.block(1).tolist() == [0, 0, *[17] * 3, *[27] * 5, 0, 0, 0, 0]
    assert not host.block(0).any() and not host.block(5).any()


def test_saves_are_complete_after_the_wait_and_have_what_the_blocks_held_at_the_start(
    layers: Layers, host: HostKVCache, blocks: HostBlocks
) -> None:
    copies = blocks.start(SchedulerOutput(step=0, saved_blocks=[3], saved_host_blocks=[0]))
    assert layers.log == ["save 0", "save 1"] and not host.block(0).any(), "nothing waits before the model runs"
    for cache in layers.caches:
        cache[3] = 99  # the step
    copies.wait()
    assert host.block(0)[2:10].tolist() == [13] * 3 + [23] * 5
    copies.wait()
    assert layers.log == ["save 0", "save 1", "wait 0", "wait 1"], "each copy is waited for once"


def test_a_plan_may_load_what_it_saves(layers: Layers, blocks: HostBlocks) -> None:
    plan = SchedulerOutput(
        step=0, saved_blocks=[3], saved_host_blocks=[2], loaded_blocks=[3, 6], loaded_host_blocks=[5, 2]
    )
    blocks.start(plan).wait()
    assert layers.log == ["save 0", "save 1", "wait 0", "wait 1", "load 0", "load 1"]
    assert [cache[[3, 6], 0].tolist() for cache in layers.caches] == [[0, 13], [0, 23]]


def test_a_load_waits_for_the_save_of_an_earlier_step_that_it_reads_and_for_no_other(
    layers: Layers, host: HostKVCache, blocks: HostBlocks
) -> None:
    first = blocks.start(SchedulerOutput(step=0, saved_blocks=[3, 4], saved_host_blocks=[2, 0]))
    second = blocks.start(SchedulerOutput(step=1, saved_blocks=[5], saved_host_blocks=[1]))
    layers.log.clear()
    blocks.start(SchedulerOutput(step=2, loaded_blocks=[7], loaded_host_blocks=[5])).wait()
    assert layers.log == ["load 0", "load 1"], "host block 5 was not saved by a step in flight"
    layers.log.clear()
    blocks.start(
        SchedulerOutput(
            step=3, saved_blocks=[2], saved_host_blocks=[4], loaded_blocks=[6, 1], loaded_host_blocks=[0, 2]
        )
    )
    assert layers.log == ["save 0", "save 1", "wait 0", "wait 1", "load 0", "load 1"]
    assert [cache[[6, 1], 0].tolist() for cache in layers.caches] == [[14, 13], [24, 23]]
    assert not host.block(1).any() and not host.block(4).any()
    layers.log.clear()
    first.wait()
    assert layers.log == [], "each copy is waited for once"
    second.wait()
    assert host.block(1)[2:10].tolist() == [15] * 3 + [25] * 5


def test_a_host_block_that_is_saved_again_keeps_the_later_contents(
    layers: Layers, host: HostKVCache, blocks: HostBlocks
) -> None:
    first = blocks.start(SchedulerOutput(step=0, saved_blocks=[3], saved_host_blocks=[2]))
    second = blocks.start(SchedulerOutput(step=1, saved_blocks=[4], saved_host_blocks=[2]))
    second.wait()
    first.wait()
    assert host.block(2)[2:10].tolist() == [14] * 3 + [24] * 5


def test_states_wait_for_saves_of_states_and_not_of_blocks(layers: Layers, host: HostKVCache) -> None:
    layers.has_states = True
    blocks, states = HostBlocks(1, layers, 16), HostKVCache(NUM_HOST, host.rank_bytes)
    blocks.map(host.path, NUM_HOST, host.rank_bytes, states.path, NUM_HOST, states.rank_bytes)
    saved_block = blocks.start(SchedulerOutput(step=0, saved_blocks=[3], saved_host_blocks=[2]))
    first = blocks.start(SchedulerOutput(step=1, saved_states=[4], saved_host_states=[2]))
    layers.log.clear()
    blocks.start(SchedulerOutput(step=2, loaded_states=[6], loaded_host_states=[2])).wait()
    assert layers.log == ["wait 0", "wait 1", "load 0", "load 1"], "of the state alone"
    assert [cache[6, 0] for cache in layers.caches] == [14, 24] and not host.block(2).any()
    second = blocks.start(SchedulerOutput(step=3, saved_states=[5], saved_host_states=[2]))
    third = blocks.start(SchedulerOutput(step=4, saved_states=[1], saved_host_states=[2]))
    for copies in (third, second, first, saved_block):
        copies.wait()
    assert states.block(2)[2:10].tolist() == [11] * 3 + [21] * 5
    assert host.block(2)[2:10].tolist() == [13] * 3 + [23] * 5


def test_host_blocks_of_a_process_that_is_gone_cannot_be_mapped(blocks: HostBlocks, host: HostKVCache) -> None:
    with pytest.raises(CacheError, match="cannot be mapped"):
        blocks.map("/proc/self/fd/99999", host.num_blocks, host.rank_bytes, "", 0, [])


def test_a_plan_without_copies_touches_nothing(layers: Layers, blocks: HostBlocks) -> None:
    assert not SchedulerOutput(step=0, rows=[1], num_scheduled_tokens=[1]).has_host_copies
    blocks.start(SchedulerOutput(step=0)).wait()
    assert layers.log == []
