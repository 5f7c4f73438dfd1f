"""Blocks whose keys were rotated differently are not shared."""

from mvllm.kv_cache.kv_cache_manager import KVCacheManager


def test_requests_share_blocks_only_where_their_position_keys_are_equal() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4, hash_seed=1)
    tokens = list(range(10))
    first = manager.make_table(tokens, position_key=10)
    manager.allocate_slots(first, 10)
    manager.cache_blocks(first, 10)
    assert manager.get_computed_blocks(manager.make_table(tokens, position_key=10)) == first.block_ids[:2]
    assert manager.get_computed_blocks(manager.make_table(tokens, position_key=11)) == []
    assert manager.get_computed_blocks(manager.make_table(tokens)) == []


def test_a_salt_never_equals_a_position_key() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4, hash_seed=1)
    tokens = list(range(10))
    first = manager.make_table(tokens, cache_salt="a", position_key=1)
    manager.allocate_slots(first, 10)
    manager.cache_blocks(first, 10)
    for salt in ("a1", "a", "1", "position_key1", "a\x00position_key\x001"):
        assert manager.get_computed_blocks(manager.make_table(tokens, cache_salt=salt)) == []
