"""Reference counts, the free list and hashes."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.kv_cache import block_pool
from mvllm.kv_cache.block_pool import BlockPool


def hash_of(i: int) -> bytes:
    return i.to_bytes(32, "big")


def pool_with_cached_blocks(num_blocks: int) -> BlockPool:
    """A pool whose blocks are all free and cached, freed in the order 0, 1, 2, ..."""
    pool = BlockPool(num_blocks)
    for block in pool.allocate(num_blocks):
        pool.set_hash(block, hash_of(block))
    for block in range(num_blocks):
        pool.free([block])
    return pool


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0)


def test_a_new_pool_allocates_every_block_once():
    pool = BlockPool(5)
    assert sorted(pool.allocate(3) + pool.allocate(2)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check_integrity()


def test_a_released_block_can_be_allocated_again():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.free(blocks[:1])
    assert pool.num_free == 1
    assert pool.allocate(1) == blocks[:1]


def test_cached_blocks_are_evicted_least_recently_used_first():
    pool = pool_with_cached_blocks(4)
    pool.touch([0])  # used again ...
    pool.free([0])  # ... so it is the most recently used now
    taken = [pool.allocate(1)[0] for _ in range(4)]
    assert taken == [1, 2, 3, 0]


def test_the_tail_of_a_table_is_evicted_before_its_beginning():
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        pool.set_hash(block, hash_of(block))
    pool.free(table)
    assert pool.free_block_ids() == table[::-1]


def test_blocks_without_hash_are_allocated_before_cached_ones():
    pool = pool_with_cached_blocks(4)
    a, b = pool.allocate(2)  # 0 and 1, which lose their hashes
    pool.set_hash(a, hash_of(9))
    pool.free([a, b])
    assert pool.free_block_ids() == [b, 2, 3, a]


def test_a_free_block_keeps_its_hash_until_it_is_allocated():
    pool = pool_with_cached_blocks(2)
    assert pool.get_cached_block(hash_of(0)) == 0
    pool.allocate(1)
    assert pool.get_cached_block(hash_of(0)) is None
    assert pool.get_cached_block(hash_of(1)) == 1


def test_touching_a_free_block_removes_it_from_the_free_list_with_its_hash():
    pool = pool_with_cached_blocks(3)
    pool.touch([1])
    assert pool.free_block_ids() == [0, 2]
    assert pool.get_cached_block(hash_of(1)) == 1
    pool.check_integrity()


def test_a_shared_block_is_free_only_after_its_last_user():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free == 0
    pool.free(blocks)
    assert pool.num_free == 1


def test_the_first_block_with_a_hash_keeps_it():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.set_hash(a, hash_of(7))
    pool.set_hash(b, hash_of(7))
    assert pool.get_cached_block(hash_of(7)) == a
    pool.check_integrity()


def test_an_evicted_hash_is_not_found_and_its_user_keeps_the_block():
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.set_hash(block, hash_of(1))
    pool.evict(block)
    assert pool.get_cached_block(hash_of(1)) is None
    assert pool.ref_counts[block] == 1
    pool.check_integrity()


def test_evicting_all_leaves_no_hash():
    pool = pool_with_cached_blocks(3)
    pool.evict_all()
    assert [pool.get_cached_block(hash_of(i)) for i in range(3)] == [None] * 3
    pool.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.ref_counts.__setitem__(0, 1),
        lambda pool: pool._next.__setitem__(1, 1),
        lambda pool: pool._prev.__setitem__(2, 0),
        lambda pool: pool._hashes.__setitem__(0, hash_of(5)),
        lambda pool: pool._block_by_hash.__setitem__(hash_of(5), 0),
        lambda pool: setattr(pool, "num_free", 2),
    ],
)
def test_check_integrity_detects_damage(damage):
    pool = BlockPool(3)
    pool.check_integrity()
    damage(pool)
    pool.free_block_ids = lambda: [0, 1, 2]  # a damaged list may be endless
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_the_memory_of_a_pool_of_a_billion_blocks_grows_with_its_use():
    pool = BlockPool(10**9)
    assert len(pool.allocate(20_000)) == 20_000
    assert len(pool.ref_counts) < 40_000
    assert pool.num_free == 10**9 - 20_000


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_any_order_of_operations_keeps_the_pool_consistent(data, num_blocks, growth):
    """Compared with a model: the free list as a plain Python list."""
    with patch.object(block_pool, "_GROWTH", growth):
        check_against_model(data, num_blocks)


def check_against_model(data, num_blocks):
    pool = BlockPool(num_blocks)
    free, names, users = list(range(num_blocks)), {}, []
    for _ in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(["allocate", "share", "name", "release"]))
        if action == "allocate":
            count = data.draw(st.integers(0, len(free)))
            taken, free = free[:count], free[count:]
            names = {n: b for n, b in names.items() if b not in taken}
            assert pool.allocate(count) == taken
            users.append(taken)
        elif action == "share" and names:
            block = data.draw(st.sampled_from(sorted(names.values())))
            pool.touch([block])
            free = [b for b in free if b != block]
            users.append([block])
        elif action == "name" and any(users):
            block = data.draw(st.sampled_from(sorted({b for table in users for b in table})))
            number = data.draw(st.integers(0, 8))
            pool.set_hash(block, hash_of(number))
            if block not in names.values():
                names.setdefault(number, block)
        elif action == "release" and users:
            table = users.pop(data.draw(st.integers(0, len(users) - 1)))
            pool.free(table)
            for block in reversed(table):
                if not any(block in other for other in users):
                    free = [*free, block] if block in names.values() else [block, *free]
        pool.check_integrity()
        assert pool.free_block_ids() == free
        assert all(pool.get_cached_block(hash_of(n)) == names.get(n) for n in range(9))
