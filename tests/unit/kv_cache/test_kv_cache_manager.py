"""Block tables, prefix cache hits, and block sharing between requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager

BLOCK_SIZE = 4


def make_manager(num_blocks: int = 16, *, enable_caching: bool = True, hash_seed: int | None = 0) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_caching=enable_caching, hash_seed=hash_seed
    )


def compute(manager: KVCacheManager, tokens: list[int], **keys: str | None) -> BlockTable:
    """A table whose tokens are all computed, with any cached prefix."""
    table = manager.make_table(tokens, **keys)
    assert manager.allocate_slots(table, len(tokens), manager.get_computed_blocks(table)) is not None
    manager.cache_blocks(table, len(tokens))
    manager.check_integrity()
    return table


def num_hit(manager: KVCacheManager, tokens: list[int], **keys: str | None) -> int:
    """Number of cached blocks that a new request with these tokens would reuse."""
    return len(manager.get_computed_blocks(manager.make_table(tokens, **keys)))


def test_a_block_without_slots_is_refused():
    with pytest.raises(ValueError, match="block_size must be at least 1, not 0"):
        KVCacheManager(num_blocks=4, block_size=0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_gets_as_many_blocks_as_its_tokens_need(num_tokens, num_blocks):
    manager = make_manager()
    table = manager.make_table(list(range(num_tokens)))
    assert len(manager.allocate_slots(table, num_tokens)) == num_blocks == len(table.block_ids)
    assert table.num_slots == num_blocks * BLOCK_SIZE


def test_a_table_grows_only_when_it_enters_a_new_block():
    manager = make_manager()
    table = manager.make_table([1])
    manager.allocate_slots(table, 1)
    assert [len(manager.allocate_slots(table, n)) for n in range(2, 10)] == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_failed_allocation_changes_nothing():
    manager = make_manager(num_blocks=3)
    table = manager.make_table(list(range(6)))
    manager.allocate_slots(table, 6)
    before = list(table.block_ids)
    assert manager.allocate_slots(table, 13) is None
    assert table.block_ids == before
    assert manager.num_free_blocks == 1
    manager.check_integrity()


def test_spare_blocks_stay_free():
    manager = make_manager(num_blocks=3)
    assert manager.allocate_slots(manager.make_table([1] * 5), 5, num_spare=2) is None
    assert manager.allocate_slots(manager.make_table([1] * 5), 5, num_spare=1) is not None


def test_cached_free_blocks_count_as_used_when_space_is_checked():
    manager = make_manager(num_blocks=3)
    manager.free(compute(manager, list(range(9))), 9)
    table = manager.make_table([*range(8), 50, 51, 52, 53, 54])
    found = manager.get_computed_blocks(table)
    assert len(found) == 2
    assert manager.allocate_slots(table, 13, found) is None  # needs 2 more, only 1 is free besides the cached ones
    manager.check_integrity()


def test_usage_is_the_share_of_blocks_in_use():
    manager = make_manager(num_blocks=8)
    assert manager.usage == 0.0
    table = compute(manager, list(range(8)))
    assert manager.usage == 0.25
    manager.free(table, 8)
    assert manager.usage == 0.0


def test_a_computed_prefix_is_found_while_it_is_in_use_and_after():
    manager = make_manager()
    table = compute(manager, list(range(12)))
    assert num_hit(manager, [*range(12), 99]) == 3
    manager.free(table, 12)
    assert num_hit(manager, [*range(12), 99]) == 3


def test_a_prefix_is_found_up_to_the_first_block_that_differs():
    manager = make_manager()
    compute(manager, list(range(12)))
    assert num_hit(manager, [0, 1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11, 12]) == 1


def test_equal_tokens_behind_another_prefix_are_not_found():
    manager = make_manager()
    compute(manager, list(range(8)))
    assert num_hit(manager, [4, 5, 6, 7, 8]) == 0


def test_the_last_known_token_is_never_found():
    manager = make_manager()
    compute(manager, list(range(8)))
    assert num_hit(manager, list(range(8))) == 1
    assert num_hit(manager, list(range(9))) == 2


def test_a_block_that_is_not_full_is_not_found():
    manager = make_manager()
    compute(manager, list(range(7)))
    assert num_hit(manager, list(range(10))) == 1


def test_only_computed_blocks_are_found():
    manager = make_manager()
    table = manager.make_table(list(range(12)))
    manager.allocate_slots(table, 12)
    manager.cache_blocks(table, 5)
    assert num_hit(manager, list(range(13))) == 1


def test_a_block_with_a_token_in_flight_is_hashed_once_the_token_is_known():
    manager = make_manager()
    tokens = [0, 1, 2]
    table = manager.make_table(tokens)
    manager.allocate_slots(table, 4)
    manager.cache_blocks(table, 4)
    assert num_hit(manager, [0, 1, 2, 3, 4]) == 0
    tokens.append(3)
    manager.cache_blocks(table, 4)
    assert num_hit(manager, [0, 1, 2, 3, 4]) == 1


def test_blocks_filled_before_the_end_are_cached():
    manager = make_manager()
    tokens = [0, 1, 2]
    table = compute(manager, tokens)
    tokens.extend([3, 4])
    manager.free(table, 4)
    assert num_hit(manager, [0, 1, 2, 3, 9]) == 1


def test_a_shared_prefix_is_computed_once():
    manager = make_manager()
    one = compute(manager, list(range(10)))
    other = compute(manager, list(range(10)))
    assert one.block_ids[:2] == other.block_ids[:2]
    assert one.block_ids[2] != other.block_ids[2]
    assert manager.num_free_blocks == 16 - 4


def test_a_cached_prefix_survives_its_first_user():
    manager = make_manager()
    one, other = compute(manager, list(range(9))), compute(manager, list(range(9)))
    manager.free(one, 9)
    manager.check_integrity()
    assert num_hit(manager, list(range(9))) == 2
    manager.free(other, 9)
    assert manager.usage == 0.0


def test_new_requests_evict_the_least_recently_used_prefix():
    manager = make_manager(num_blocks=4)
    for start in (0, 100):
        manager.free(compute(manager, list(range(start, start + 8))), 8)
    compute(manager, [500] * 5)
    assert num_hit(manager, list(range(9))) == 0
    assert num_hit(manager, list(range(100, 109))) == 2


def test_the_hashes_of_two_managers_differ_unless_seeded():
    def names(hash_seed):
        return compute(make_manager(hash_seed=hash_seed), list(range(8))).block_hashes

    assert names(None) != names(None)
    assert names(1) == names(1) != names(2)


def test_a_failed_request_leaves_no_cached_blocks():
    manager = make_manager()
    good = compute(manager, list(range(8)))
    failed = compute(manager, list(range(16)))
    manager.discard([failed])
    manager.check_integrity()
    assert num_hit(manager, list(range(17))) == 0
    assert manager.num_free_blocks == 16 - len(good.block_ids)


def test_a_failure_evicts_blocks_that_were_freed_before():
    manager = make_manager()
    table = compute(manager, list(range(8)))
    manager.free(table, 8)
    manager.discard([table])
    assert num_hit(manager, list(range(9))) == 0
    manager.check_integrity()


def test_the_prefix_cache_is_reset_only_when_no_request_holds_blocks():
    manager = make_manager()
    table = compute(manager, list(range(8)))
    assert not manager.reset_prefix_cache()
    assert num_hit(manager, list(range(9))) == 2
    manager.free(table, 8)
    assert manager.reset_prefix_cache()
    assert num_hit(manager, list(range(9))) == 0
    manager.check_integrity()


def test_what_was_computed_with_old_weights_is_forgotten_while_requests_keep_their_blocks():
    manager = make_manager()
    tokens = list(range(8))
    table = compute(manager, tokens)
    manager.unconfirmed.end_plan(0)
    manager.confirm(0)
    manager.forget_computed()
    assert num_hit(manager, list(range(9))) == 0
    assert len(table.block_ids) == 2
    tokens += range(8, 12)
    assert manager.allocate_slots(table, 12) is not None
    manager.cache_blocks(table, 12)
    assert num_hit(manager, list(range(13))) == 0, "a block behind old ones would be found"
    manager.check_integrity()
    manager.free(table, 12)
    other = compute(manager, list(range(12)))
    assert num_hit(manager, list(range(13))) == 3
    manager.free(other, 12)
    manager.check_integrity()


def test_without_caching_nothing_is_found():
    manager = make_manager(enable_caching=False)
    manager.free(compute(manager, list(range(8))), 8)
    assert num_hit(manager, list(range(9))) == 0


def test_without_caching_siblings_share_their_prompt_and_nothing_else():
    manager = make_manager(enable_caching=False)
    tokens = list(range(9))
    table = compute(manager, tokens, sibling_group="g")
    tokens.extend([9, 10, 11])
    manager.allocate_slots(table, 12)
    manager.cache_blocks(table, 12)
    assert num_hit(manager, list(range(9)), sibling_group="g") == 2
    assert num_hit(manager, list(range(13)), sibling_group="g") == 2  # the third block is only partly prompt
    assert num_hit(manager, list(range(9)), sibling_group="h") == 0
    assert num_hit(manager, list(range(9))) == 0


def test_with_caching_siblings_share_like_other_requests():
    manager = make_manager()
    compute(manager, list(range(9)), sibling_group="g")
    assert num_hit(manager, list(range(9)), sibling_group="h") == 2
    assert num_hit(manager, list(range(9))) == 2


salts = st.one_of(st.none(), st.text(alphabet="ab|\0", max_size=3))
groups = st.one_of(st.none(), st.text(alphabet="ab|\0", max_size=3))


@given(salts, groups, salts, groups, st.booleans())
def test_requests_share_blocks_only_if_salt_adapter_and_other_keys_are_equal(
    salt, group, other_salt, other_group, enable_caching
):
    manager = make_manager(enable_caching=enable_caching)
    compute(manager, list(range(9)), cache_salt=salt, sibling_group=group)
    hit = num_hit(manager, list(range(9)), cache_salt=other_salt, sibling_group=other_group)
    may_share = salt == other_salt and (enable_caching or (group is not None and group == other_group))
    assert hit == (2 if may_share else 0)


@given(st.lists(st.tuples(salts, st.lists(st.integers(0, 1), min_size=1, max_size=20)), max_size=8))
def test_a_hit_is_always_the_longest_prefix_that_was_computed_under_the_same_salt(requests):
    manager = make_manager(num_blocks=64)
    seen: list[tuple[str | None, list[int]]] = []
    for salt, tokens in requests:
        expected = 0
        for other_salt, other in seen:
            if salt == other_salt:
                common = next(
                    (i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other))
                )
                expected = max(expected, min(common, len(tokens) - 1) // BLOCK_SIZE)
        assert num_hit(manager, tokens, cache_salt=salt) == expected
        compute(manager, tokens, cache_salt=salt)
        seen.append((salt, tokens))


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.block_ids.append(5),
        lambda table: table.block_ids.pop(),
        lambda table: table.block_ids.__setitem__(1, table.block_ids[0]),
        lambda table: setattr(table, "num_slots", 4),
    ],
)
def test_check_integrity_detects_a_table_that_contradicts_the_pool(damage):
    manager = make_manager()
    table = compute(manager, list(range(8)))
    damage(table)
    with pytest.raises(AssertionError):
        manager.check_integrity()
