"""State slots beside blocks: who holds them, which snapshots are found, and when they get their hashes."""

from __future__ import annotations

import pytest

from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.state_kv_cache_manager import StateKVCacheManager


def make_manager(num_state_slots: int = 6, *, interval: int = 8, **settings) -> StateKVCacheManager:
    return StateKVCacheManager(
        **{"num_blocks": 40, "block_size": 4, "hash_seed": 0, **settings},
        num_state_slots=num_state_slots,
        state_snapshot_interval=interval,
        least_snapshot_distance=4,
    )


def start(manager: StateKVCacheManager, tokens: list[int], **keys) -> BlockTable:
    table = manager.make_table(tokens, **keys)
    prefix = manager.find_prefix(table)
    assert manager.allocate_slots(table, len(tokens), prefix.blocks) is not None
    position = len(prefix.blocks) // manager.num_groups * manager.block_size
    manager.states.choose_positions(table, position, prefix.num_shared_tokens)
    manager.states.record_prompt(table, (0, 0))
    return table


def plan(manager: StateKVCacheManager, table: BlockTable, end: int) -> tuple[int, int]:
    """Plans a step of one request. Returns the slots that it reads and writes."""
    manager.states.start_plan()
    manager.cache_blocks(table, end)
    [read], [write] = manager.states.assign([table], [end])
    manager.check_integrity()
    return read, write


def found_tokens(manager: StateKVCacheManager, tokens: list[int]) -> int:
    return len(manager.get_computed_blocks(manager.make_table(tokens))) // manager.num_groups * manager.block_size


def test_a_snapshot_is_found_from_the_next_plan_on():
    manager, prompt = make_manager(), list(range(20))
    table = start(manager, prompt)
    assert plan(manager, table, 8)[0] == -1
    assert found_tokens(manager, prompt) == 0
    manager.states.start_plan()
    assert found_tokens(manager, prompt) == 8


def test_a_cached_prefix_ends_at_a_snapshot_though_blocks_go_on():
    manager, prompt = make_manager(interval=0), list(range(20))
    table = start(manager, prompt)
    assert table.state.next_snapshot == 16
    plan(manager, table, 16)
    manager.free(table, 16)
    assert [found_tokens(manager, prompt[:count]) for count in (20, 17, 16, 12)] == [16, 16, 0, 0]


def test_the_blocks_of_all_groups_decide_which_snapshot_is_found():
    manager, prompt = make_manager(windows=(None, 4)), list(range(30))
    table = start(manager, prompt)
    for end in (8, 16, 24):
        plan(manager, table, end)
        assert manager.allocate_slots(table, len(prompt), num_computed_tokens=end) is not None
    manager.free(table, 24)
    assert found_tokens(manager, prompt) == 24
    for block_hash in table.block_hashes[5:]:  # the last block before 24, in the group with a window
        block = manager._pool.get_cached_block(block_hash + b"\x01\x00")
        if block is not None:
            manager._pool.evict(block)
    assert found_tokens(manager, prompt) == 16


def test_a_snapshot_in_use_is_not_evicted():
    manager, prompt = make_manager(num_state_slots=3), list(range(9))
    first = start(manager, prompt)
    _, snapshot = plan(manager, first, 8)
    manager.free(first, 8)
    reader = start(manager, prompt)
    other = start(manager, [99] * 3)
    assert reader.state.source == snapshot and snapshot not in (reader.state.slot, other.state.slot)
    assert manager.states.num_free == 0
    assert manager.allocate_slots(manager.make_table([98] * 3), 3) is None
    assert plan(manager, reader, 9) == (snapshot, reader.state.slot)
    assert manager.states.num_free == 1


def test_the_state_behind_unknown_tokens_gets_its_hash_when_they_are_known():
    manager, tokens = make_manager(), list(range(5))
    table = start(manager, tokens)
    manager.allocate_slots(table, 12)
    plan(manager, table, 5)
    for end in (6, 7, 8):  # the tokens 5, 6 and 7 are in flight
        plan(manager, table, end)
    plan(manager, table, 9)
    assert found_tokens(manager, list(range(9))) == 0
    tokens += [5, 6, 7]
    manager.cache_blocks(table, 9)
    assert found_tokens(manager, list(range(9))) == 0
    manager.states.start_plan()
    assert found_tokens(manager, list(range(9))) == 8


@pytest.mark.parametrize(("num_known", "found"), [(7, 0), (8, 8)])
def test_a_request_that_ends_leaves_only_snapshots_of_known_tokens(num_known, found):
    manager, tokens = make_manager(), list(range(5))
    table = start(manager, tokens)
    manager.allocate_slots(table, 12)
    for end in (5, 6, 7, 8):
        plan(manager, table, end)
    tokens += range(5, num_known)
    manager.free(table, 8)
    manager.check_integrity()
    assert manager.states.num_free == 6
    assert found_tokens(manager, list(range(9))) == found


def test_a_failed_request_takes_the_readers_of_its_snapshots_along():
    manager, prompt = make_manager(), list(range(20))
    bad = start(manager, prompt)
    plan(manager, bad, 8)
    manager.states.start_plan()
    reader, other = start(manager, prompt), start(manager, [50, 51, 52])
    assert manager.discard([bad]) == [reader]
    manager.check_integrity()
    assert found_tokens(manager, prompt) == 0
    assert (bad.state.slot, reader.state.slot, other.state.slot >= 0) == (-1, -1, True)


def test_a_state_that_is_kept_already_takes_no_second_slot():
    manager, prompt = make_manager(), list(range(20))
    first = start(manager, prompt)
    plan(manager, first, 8)
    manager.states.start_plan()
    twin = manager.make_table(prompt)
    manager.allocate_slots(twin, 20)  # without the cache, as a request that needs every position
    manager.states.choose_positions(twin, 0, 0)
    before = manager.states.num_free
    write = plan(manager, twin, 8)[1]
    assert (manager.states.num_free, twin.state.slot) == (before, write)


def test_integrity_fails_if_a_slot_leaks_or_a_snapshot_would_be_written():
    manager = make_manager()
    table = start(manager, list(range(9)))
    plan(manager, table, 8)
    manager.states.start_plan()
    snapshot, own = table.state.source, table.state.slot
    table.state.slot = snapshot
    with pytest.raises(AssertionError, match="State slot"):
        manager.check_integrity()
    table.state.slot = own
    manager.check_integrity()
    manager.states._pool.allocate(1)
    with pytest.raises(AssertionError, match="State slot"):
        manager.check_integrity()
