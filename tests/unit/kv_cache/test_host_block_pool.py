"""The index of host blocks: eviction order, pins, and contents that are forgotten while they are in use."""

from __future__ import annotations

import random

from mvllm.kv_cache.host_block_pool import HostBlockPool


def fill(blocks: HostBlockPool, *keys: bytes) -> list[int]:
    found = []
    for key in keys:
        index = blocks.allocate(key)
        assert index is not None
        blocks.publish(index)
        blocks.unpin(index)
        found.append(index)
    return found


def test_the_least_recently_used_contents_are_evicted_first():
    blocks = HostBlockPool(3)
    a, b, c = fill(blocks, b"a", b"b", b"c")
    blocks.pin(a)
    blocks.unpin(a)
    assert fill(blocks, b"d") == [b]
    assert [blocks.get(key) for key in (b"a", b"b", b"c", b"d")] == [a, None, c, b]


def test_pinned_host_blocks_are_not_evicted():
    blocks = HostBlockPool(2)
    a, _ = fill(blocks, b"a", b"b")
    blocks.pin(a)
    assert blocks.num_available == 1
    fill(blocks, b"c")
    blocks.pin(blocks.get(b"c"))
    assert blocks.allocate(b"d") is None and blocks.num_available == 0
    blocks.unpin(a)
    assert blocks.allocate(b"d") == a


def test_contents_are_found_once_they_are_complete():
    blocks = HostBlockPool(2)
    index = blocks.allocate(b"a")
    assert blocks.get(b"a") is None and blocks.get_filling(b"a") == index
    blocks.publish(index)
    assert blocks.get(b"a") == index and blocks.get_filling(b"a") is None


def test_discarded_contents_are_not_found_and_their_host_block_is_free_after_the_last_pin():
    blocks = HostBlockPool(2)
    index = blocks.allocate(b"a")
    blocks.discard([b"a", b"unknown"])
    blocks.publish(index)  # too late
    assert blocks.get(b"a") is None and blocks.key_of(index) is None and blocks.num_available == 1
    again = blocks.allocate(b"a")
    assert again != index
    blocks.unpin(index)
    assert blocks.num_available == 1
    blocks.check_integrity({again: 1})


def test_random_use_keeps_the_index_consistent():
    dice = random.Random(5)
    blocks, pins, contents = HostBlockPool(6), {}, {}
    for _ in range(3000):
        key, action = bytes([dice.randrange(12)]), dice.random()
        if action < 0.4 and blocks.get(key) is None and blocks.get_filling(key) is None:
            index = blocks.allocate(key)
            assert (index is None) == (len(pins) == 6)
            if index is not None:
                assert index not in pins
                pins[index] = 1
                contents = {k: i for k, i in contents.items() if i != index}
                if dice.random() < 0.8:
                    blocks.publish(index)
                    contents[key] = index
                else:
                    blocks.discard([key])
        elif action < 0.6 and (index := blocks.get(key)) is not None:
            blocks.pin(index)
            pins[index] = pins.get(index, 0) + 1
        elif action < 0.9 and pins:
            index = dice.choice(list(pins))
            blocks.unpin(index)
            pins[index] -= 1
            pins = {i: count for i, count in pins.items() if count}
        elif action > 0.97:
            blocks.discard([key])
            contents.pop(key, None)
        blocks.check_integrity(pins)
        assert {k: blocks.get(k) for k in contents} == contents
