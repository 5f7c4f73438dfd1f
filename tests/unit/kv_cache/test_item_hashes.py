"""Names of blocks, events and routing keys take in the images, audio and embeddings of a prompt."""

from __future__ import annotations

from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_events.block_index import KVBlockIndex
from mvllm.kv_events.prefix_index import chunk_tokens
from mvllm.messages.multimodal import ItemSpan

SIZE = 4
TOKENS = list(range(40))


def span(name: str, offset: int, length: int) -> ItemSpan:
    return ItemSpan(name.encode().ljust(32, b"."), offset, length, [(0, length)] if length else [])


def make_manager(block_size: int = SIZE) -> KVCacheManager:
    return KVCacheManager(num_blocks=64, block_size=block_size, hash_seed=1)


def compute(manager: KVCacheManager, items: list[ItemSpan], tokens: list[int] = TOKENS) -> BlockTable:
    table = manager.make_table(list(tokens), items=items)
    assert manager.allocate_slots(table, len(tokens), manager.get_computed_blocks(table)) is not None
    manager.cache_blocks(table, len(tokens))
    manager.free(table, len(tokens))
    return table


def num_cached(manager: KVCacheManager, items: list[ItemSpan]) -> int:
    return len(manager.get_computed_blocks(manager.make_table(list(TOKENS), items=items))) * SIZE


def test_blocks_are_shared_up_to_the_first_item_that_differs() -> None:
    manager = make_manager()
    compute(manager, [span("cat", 9, 6), span("dog", 20, 8)])
    assert num_cached(manager, [span("cat", 9, 6), span("dog", 20, 8)]) == 36
    assert num_cached(manager, [span("cat", 9, 6), span("cow", 20, 8)]) == 20
    assert num_cached(manager, [span("cow", 9, 6), span("dog", 20, 8)]) == 8
    assert num_cached(manager, [span("cat", 10, 5), span("dog", 20, 8)]) == 8  # other rows at the same positions
    assert num_cached(manager, []) == 8


def test_a_block_is_shared_only_if_the_rows_behind_it_attend_to_it_alike() -> None:
    whole = ItemSpan(b"cat".ljust(32, b"."), 9, 9, [(0, 8)])
    in_two_parts = ItemSpan(b"cat".ljust(32, b"."), 9, 9, [(0, 3), (4, 9)])
    in_two_later = ItemSpan(b"cat".ljust(32, b"."), 9, 9, [(0, 7), (8, 9)])
    manager = make_manager()
    compute(manager, [whole])
    assert num_cached(manager, [whole]) == 36
    assert num_cached(manager, [in_two_parts]) == num_cached(manager, [in_two_later]) == 8


def test_an_item_without_positions_decides_about_every_block() -> None:
    manager = make_manager()
    compute(manager, [span("speech", 0, 0)])
    assert num_cached(manager, [span("speech", 0, 0)]) == 36
    assert num_cached(manager, [span("song", 0, 0)]) == num_cached(manager, []) == 0


def test_text_has_the_same_hashes_whether_items_are_known_or_not() -> None:
    manager = make_manager()
    assert compute(manager, []).block_hashes == compute(make_manager(), []).block_hashes


def test_events_name_the_items_of_each_block_and_an_index_keeps_them() -> None:
    manager = make_manager()
    recorder = manager.record_events(with_events=True, with_changes=False)
    cat = [span("cat", 6, 4)]
    compute(manager, cat)
    [stored] = events = recorder.pop_events()
    name = cat[0].content_hash.hex()
    assert stored.extra_keys[:4] == [[], [f"{name}:2"], [f"{name}:-2"], []]
    copy, again = KVBlockIndex(), KVBlockIndex()
    copy.apply(events)
    for batch in copy.as_events(3):
        again.apply(batch)
    assert {block_hash: block.items for block_hash, block in again.blocks.items()} == {
        block_hash: block.items for block_hash, block in copy.blocks.items()
    }


def test_a_load_balancer_expects_a_prefix_only_with_its_item() -> None:
    manager = make_manager(16)
    recorder = manager.record_events(with_events=False, with_changes=True)
    prompt = list(range(1024))
    cat, dog = [span("cat", 70, 40)], [span("dog", 70, 40)]
    compute(manager, cat, prompt)
    balancer = DPLoadBalancer(1)
    balancer.set_cache_size(chunk_tokens(16), 4096)
    changes = recorder.pop_changes()
    assert changes is not None
    balancer.update_cache(0, changes)
    expected = []
    for items in (cat, dog, []):
        keys = balancer._prefix_keys(prompt, None, items=items)
        expected.append(balancer._reported.match(keys).get(0, 0))
    assert expected == [16, 1, 1]
