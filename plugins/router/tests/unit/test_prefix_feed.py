"""A PrefixIndex follows the cache of a replica by its events."""

from __future__ import annotations

import random
from pathlib import Path

from mvllm.config.kv_events import KVEventsConfig
from mvllm.extension_api.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventSubscriber,
    PrefixIndex,
    prefix_keys,
    root_key,
)
from mvllm.kv_events.prefix_index import ids_with_items
from mvllm.messages.kv_events import DEVICE, DISK
from mvllm_router.prefix_feed import PrefixFeed
from tests.unit.kv_cache.test_item_hashes import TOKENS, compute, make_manager, span
from tests.unit.kv_events.test_event_stream import SIZE, Cache, catch_up


def index_of(replica: str) -> tuple[PrefixIndex[str], PrefixFeed]:
    index: PrefixIndex[str] = PrefixIndex()
    index.add_replica(replica)
    return index, PrefixFeed(index, replica)


def test_a_prefix_index_follows_the_events(tmp_path: Path) -> None:
    """Its longest prefixes are the cache's, also while the first blocks of a prompt are evicted and come back."""
    config = KVEventsConfig(
        True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
    )
    cache = Cache(config)
    index, feed = index_of("A")
    client = KVEventSubscriber(config.endpoint, config.replay_endpoint, on_events=feed.apply, check_seconds=0.02)
    rng = random.Random(5)
    found = 0
    for _ in range(60):
        for _ in range(3):
            cache.random_step(rng)
        catch_up(client, cache)
        for _ in range(20):
            tokens = [rng.randrange(2) for _ in range(3 * SIZE + 1)]
            salt = rng.choice((None, "pepper"))
            table = cache.manager.make_table(tokens, cache_salt=salt)
            keys = prefix_keys(tokens, SIZE, root_key([] if salt is None else [("cache_salt", salt)]))
            length = index.match(keys).get("A", 0)
            assert length == len(cache.manager.get_computed_blocks(table))
            found += length > 0
    assert found > 100
    client.close()
    cache.close()


def test_blocks_whose_tokens_are_not_known_are_found_when_they_are() -> None:
    """As after a restart: the store of a connector has blocks that the engine cannot name."""
    index, feed = index_of("A")
    prompt, names = list(range(8)), [b"1" * 32, b"2" * 32]
    feed.apply([BlockStored([name], None, [], 4, medium=DISK) for name in names])
    assert not index.match(prefix_keys(prompt, 4))
    feed.apply([BlockStored(names, None, prompt, 4, medium=DEVICE)])
    assert index.match(prefix_keys(prompt, 4)) == {"A": 2}
    feed.apply([BlockRemoved(names, DEVICE)])
    assert index.match(prefix_keys(prompt, 4)) == {"A": 2}  # they are still in the store
    feed.apply([BlockRemoved(names[1:], DISK)])
    assert index.match(prefix_keys(prompt, 4)) == {"A": 1}


def test_prompts_with_other_items_have_other_keys() -> None:
    manager = make_manager()
    recorder = manager.record_events(with_events=True, with_changes=False)
    cat, dog = [span("cat", 6, 4)], [span("dog", 6, 4)]
    compute(manager, cat)
    index, feed = index_of("a")
    feed.apply(recorder.pop_events())
    for items, found in ((cat, {"a": 9}), (dog, {"a": 1}), ([], {"a": 1})):
        assert index.match(prefix_keys(ids_with_items(TOKENS, items), SIZE)[:9]) == found
