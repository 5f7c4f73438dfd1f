"""Groups of layers with windows: allocated and freed blocks, and cached prefixes."""

import random

import pytest

from mvllm.config.sliding_window_blocks import first_visible_block, max_blocks_held
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager

BLOCK_SIZE = 4
MAX_STEP = 8


def make_manager(*windows: int | None, num_blocks: int = 32, enable_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        enable_caching=enable_caching,
        hash_seed=0,
        windows=windows,
        max_step_tokens=MAX_STEP,
    )


def compute(manager: KVCacheManager, tokens: list[int], *, most_held: int | None = None) -> BlockTable:
    """A table whose tokens are all computed, MAX_STEP at a time."""
    table = manager.make_table(tokens)
    found = manager.get_computed_blocks(table)
    start = len(found) // manager.num_groups * BLOCK_SIZE
    while start < len(tokens):
        assert manager.allocate_slots(table, len(tokens), found, num_computed_tokens=start) is not None
        start, found = min(start + MAX_STEP, len(tokens)), []
        assert table.num_slots >= start
        manager.cache_blocks(table, start)
        manager.check_integrity()
        assert most_held is None or len(table.held_blocks) <= most_held
    return table


def num_hit(manager: KVCacheManager, tokens: list[int]) -> int:
    """Number of cached tokens that a new request with these tokens would reuse."""
    return len(manager.get_computed_blocks(manager.make_table(tokens))) // manager.num_groups * BLOCK_SIZE


@pytest.mark.parametrize(
    ("num_computed", "window", "first"),
    [(0, 6, 0), (13, 6, 2), (12, 6, 1), (8, 1, 2), (7, 1, 1), (7, 9, 0), (12, 5, 2)],
)
def test_the_first_block_within_the_window(num_computed, window, first):
    assert first_visible_block(num_computed, window, BLOCK_SIZE) == first
    seen = range(max(0, num_computed - window + 1), num_computed + 1)
    assert first == min(seen) // BLOCK_SIZE


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_only_the_blocks_of_a_step_and_its_window_are_allocated(window, step):
    touched = max(
        (start + step - 1) // BLOCK_SIZE - max(0, start - window + 1) // BLOCK_SIZE + 1 for start in range(50)
    )
    assert max_blocks_held(1000, window, BLOCK_SIZE, step) == touched
    assert max_blocks_held(3, window, BLOCK_SIZE, step) == 1
    assert max_blocks_held(1000, None, BLOCK_SIZE, step) == 250


def test_a_window_without_tokens_is_refused():
    with pytest.raises(ValueError, match="windows must have a positive number"):
        make_manager(None, 0)
    with pytest.raises(ValueError, match="windows must have a positive number"):
        make_manager()


def test_a_sequence_far_longer_than_the_pool_fits_where_all_layers_have_windows():
    manager = make_manager(6, num_blocks=5)
    table = compute(manager, list(range(400)), most_held=max_blocks_held(400, 6, BLOCK_SIZE, MAX_STEP))
    for _ in range(100):  # and continues, one token at a time
        table.token_ids.append(7)
        start = len(table.token_ids) - 1
        assert manager.allocate_slots(table, start + 1, num_computed_tokens=start) is not None
        manager.cache_blocks(table, start + 1)
        manager.check_integrity()
    assert len(table.held_blocks) <= 3
    assert manager.num_free_blocks >= 2
    manager.free(table, 500)
    assert manager.usage == 0.0


def test_sliding_window_layers_hold_their_window_beside_full_attention_layers():
    manager = make_manager(None, 6, 6)
    table = compute(manager, list(range(40)))
    last = max_blocks_held(40, 6, BLOCK_SIZE, MAX_STEP)
    assert [len(blocks.held) for blocks in table.groups] == [10, last, last]
    table.token_ids.append(1)
    manager.allocate_slots(table, 41, num_computed_tokens=40)
    assert [len(blocks.held) for blocks in table.groups] == [11, 3, 3]
    assert [len(blocks.block_ids) for blocks in table.groups] == [11, 11, 11]
    assert manager.num_free_blocks == 32 - 17


def test_blocks_within_the_window_are_never_freed():
    manager = make_manager(5)
    table = manager.make_table(list(range(9)))
    manager.allocate_slots(table, 9)
    before = list(table.block_ids)
    manager.allocate_slots(table, 9, num_computed_tokens=7)  # token 7 attends to position 3, in the first block
    assert table.groups[0].held == before
    manager.allocate_slots(table, 9, num_computed_tokens=8)
    assert table.groups[0].held == before[1:]


def test_a_prefix_is_found_by_its_last_window_after_the_rest_was_evicted():
    manager = make_manager(6, num_blocks=6)
    manager.free(compute(manager, list(range(41))), 41)
    table = manager.make_table([*range(40), 99])
    found = manager.get_computed_blocks(table)
    assert len(found) == 10  # positions from 35 are in the window: two blocks
    manager.allocate_slots(table, 41, found)
    assert len(table.held_blocks) == 3
    manager.check_integrity()


def test_a_prefix_is_found_only_as_far_as_all_groups_have_it():
    manager = make_manager(None, 5)
    tokens = list(range(33))
    table = compute(manager, tokens)
    assert num_hit(manager, tokens) == 32
    window_block = table.groups[1].block_ids[7]
    manager.free(table, 33)
    manager._pool.evict(window_block)
    assert num_hit(manager, tokens) == 28
    manager._pool.evict(
        manager._pool.get_cached_block(table.block_hashes[2])
    )  # the third block of the full-attention group
    assert num_hit(manager, tokens) == 8


def test_blocks_of_one_group_are_not_found_by_another():
    manager = make_manager(None, 9, 9)
    table = compute(manager, list(range(9)))
    found = manager.get_computed_blocks(manager.make_table(list(range(9))))
    assert found == [*table.groups[0].block_ids[:2], *table.groups[1].block_ids[:2], *table.groups[2].block_ids[:2]]
    assert len(set(found)) == 6


def test_a_failed_request_is_evicted_in_every_group_with_its_freed_blocks():
    manager = make_manager(None, 5)
    failed = compute(manager, list(range(33)))
    manager.discard([failed])
    assert num_hit(manager, list(range(33))) == 0
    assert not manager._pool._block_by_hash
    manager.check_integrity()


def test_nothing_is_allocated_unless_all_groups_have_enough_blocks():
    manager = make_manager(None, 6, num_blocks=7)
    assert manager.allocate_slots(manager.make_table([1] * 16), 16, num_spare=0) is None  # 4 and 4
    assert manager.num_free_blocks == 7
    assert manager.allocate_slots(manager.make_table([1] * 12), 12, num_spare=1) is not None
    assert manager.num_free_blocks == 1


def test_the_end_of_a_prefix_is_evicted_first_in_all_groups():
    manager = make_manager(None, 100, num_blocks=8)
    manager.free(compute(manager, list(range(16))), 16)
    manager.free(compute(manager, [50]), 1)  # allocates a block of each group
    assert num_hit(manager, list(range(17))) == 12


class Model:
    """The manager and a model of the contents and hash of each block."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.windows = dice.choice([(None,), (1,), (6,), (None, 3), (None, 9, 9), (2, 7), (None, None, 5)])
        caching = dice.random() < 0.9
        self.manager = make_manager(*self.windows, num_blocks=dice.randrange(12, 40), enable_caching=caching)
        self.caching = caching
        self.contents: dict[int, object] = {}
        self.named: dict[object, int] = {}
        self.running: dict[BlockTable, int] = {}

    def name(self, group: int, tokens: list[int], block: int) -> object:
        return group, tuple(tokens[: (block + 1) * BLOCK_SIZE])

    def note(self, table: BlockTable, start: int, end: int, new: list[int]) -> None:
        """Records a step over [start, end), with `new` blocks for the table, whose results have arrived."""
        self.manager.unconfirmed.end_plan(0)
        self.manager.confirm(0)
        for block in new:
            self.contents.pop(block, None)
        self.named = {name: at for name, at in self.named.items() if at not in new}
        for group, blocks in enumerate(table.groups):
            for i in range(start // BLOCK_SIZE, end // BLOCK_SIZE):
                name = self.name(group, table.token_ids, i)
                self.contents[blocks.block_ids[i]] = name
                if self.caching and blocks.block_ids[i] not in self.named.values():
                    self.named.setdefault(name, blocks.block_ids[i])

    def longest_hit(self, tokens: list[int]) -> int:
        for length in range((len(tokens) - 1) // BLOCK_SIZE, 0, -1):
            firsts = [0 if w is None else max(0, length * BLOCK_SIZE - w + 1) // BLOCK_SIZE for w in self.windows]
            if all(
                self.name(group, tokens, i) in self.named
                for group, first in enumerate(firsts)
                for i in range(first, length)
            ):
                return length * BLOCK_SIZE
        return 0

    def add(self) -> None:
        tokens = [self.dice.choice((1, 1, 1, 1, 1, 1, 1, 2)) for _ in range(self.dice.randrange(1, 60))]
        table = self.manager.make_table(tokens)
        found = self.manager.get_computed_blocks(table)
        start = len(found) // len(self.windows) * BLOCK_SIZE
        assert start == self.longest_hit(tokens)
        free = self.manager.num_free_blocks
        new = self.manager.allocate_slots(table, len(tokens), found)
        if new is None:
            assert self.manager.num_free_blocks == free
            return
        self.running[table] = start
        self.advance(table, new)

    def advance(self, table: BlockTable, new: list[int] | None = None) -> None:
        start = self.running[table]
        if start == len(table.token_ids):
            table.token_ids.append(self.dice.randrange(1, 3))
        if new is None:
            new = self.manager.allocate_slots(table, len(table.token_ids), num_computed_tokens=start)
        if new is None:
            self.manager.free(table, start)
            del self.running[table]
            return
        end = self.running[table] = min(start + self.dice.randrange(1, MAX_STEP + 1), len(table.token_ids))
        assert end <= table.num_slots
        self.manager.cache_blocks(table, end)
        self.note(table, start, end, new)
        for group, (blocks, window) in enumerate(zip(table.groups, self.windows, strict=True)):
            assert len(blocks.held) <= max_blocks_held(len(table.token_ids), window, BLOCK_SIZE, MAX_STEP)
            for i in range(0 if window is None else first_visible_block(start, window, BLOCK_SIZE), end // BLOCK_SIZE):
                assert i >= blocks.num_dropped
                assert self.contents[blocks.block_ids[i]] == self.name(group, table.token_ids, i)

    def discard(self, table: BlockTable) -> None:
        self.manager.discard([table])
        end = self.running.pop(table)
        for group in range(len(self.windows)):
            for i in range(len(table.token_ids) // BLOCK_SIZE if self.caching else 0):
                if i < max(len(table.block_hashes), end // BLOCK_SIZE):
                    self.named.pop(self.name(group, table.token_ids, i), None)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_within_the_window_stay_and_hits_are_the_longest_of_all_groups(seed):
    model = Model(random.Random(seed))
    for _ in range(120):
        action = model.dice.random()
        tables = list(model.running)
        if action < 0.25 or not tables:
            model.add()
        elif action < 0.9:
            model.advance(model.dice.choice(tables))
        elif action < 0.97:
            table = model.dice.choice(tables)
            model.manager.free(table, model.running.pop(table))
        else:
            model.discard(model.dice.choice(tables))
        model.manager.check_integrity()
    for table, num_computed in model.running.items():
        model.manager.free(table, num_computed)
    assert model.manager.usage == 0.0
