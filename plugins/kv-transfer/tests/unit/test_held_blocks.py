"""Blocks that a producer holds for other engines: until they are fetched, too old or too many."""

from __future__ import annotations

import random

import pytest

from mvllm.extension_api.kv_transfer import HostBlock
from mvllm_kv_transfer.remote.held_blocks import HeldBlocks


class Holder:
    """HeldBlocks with a clock, and a record of what is released."""

    def __init__(self, max_blocks: int = 4, max_states: int = 1) -> None:
        self.time = 0.0
        self.released: list[bytes] = []
        self.num_changes = 0
        self.held = HeldBlocks(
            max_blocks, max_states, 10.0, lambda block: self.released.append(block.key), self._change, lambda: self.time
        )

    def _change(self) -> None:
        self.num_changes += 1

    def add(self, *names: bytes, is_state: bool = False) -> list[bool]:
        added = [self.held.add(HostBlock(name, index, is_state)) for index, name in enumerate(names)]
        self.held.check_integrity()
        return added

    def fetch(self, key: bytes, request: str) -> HostBlock | None:
        block = self.held.begin_read(key, False)
        if block is not None:
            self.held.end_read(key, request, was_fetched=True)
        self.held.check_integrity()
        return block


def test_a_block_is_held_from_its_save_until_it_is_fetched():
    holder = Holder()
    holder.held.expect("r", [b"a", b"b"])
    assert holder.held.waits_for("r", [b"a"])
    assert holder.add(b"a", b"b", b"other") == [True, True, False]
    assert not holder.held.waits_for("r", [b"a", b"b"])
    assert holder.held.find([b"a", b"b", b"other"]) == [True, True, False]
    assert holder.fetch(b"a", "r") == HostBlock(b"a", 0)
    assert holder.released == [b"a"]
    assert holder.fetch(b"b", "r") is not None
    assert holder.held.num_held == 0


def test_a_block_of_two_requests_is_held_until_both_have_fetched_it():
    holder = Holder()
    holder.held.expect("r", [b"a"])
    holder.add(b"a")
    holder.held.expect("q", [b"a"])
    holder.fetch(b"a", "r")
    assert holder.released == []
    holder.fetch(b"a", "q")
    assert holder.released == [b"a"]


def test_a_block_that_is_saved_twice_is_released_twice():
    holder = Holder()
    holder.held.expect("r", [b"a"])
    assert holder.add(b"a") == [True]
    assert holder.add(b"a") == [True]
    holder.held.release("r")
    assert holder.released == [b"a", b"a"]


def test_a_request_is_released_when_its_time_is_over():
    holder = Holder()
    holder.held.expect("r", [b"a"])
    holder.add(b"a")
    holder.time = 4.0
    assert holder.held.release_expired() == 6.0
    assert holder.released == []
    holder.time = 10.0
    assert holder.held.release_expired() is None
    assert holder.released == [b"a"]


def test_the_oldest_request_gives_way():
    holder = Holder(max_blocks=2)
    for name in (b"a", b"b", b"c"):
        holder.held.expect(name.decode(), [name])
        assert holder.add(name) == [True]
    assert holder.released == [b"a"]
    assert holder.held.find([b"a", b"b", b"c"]) == [False, True, True]


def test_of_a_request_that_is_too_large_the_first_blocks_are_held():
    holder = Holder(max_blocks=2)
    holder.held.expect("r", [b"a", b"b", b"c"])
    assert holder.add(b"a", b"b", b"c") == [True, True, False]
    assert not holder.held.waits_for("r", [b"c"])


def test_states_have_a_limit_of_their_own():
    holder = Holder(max_blocks=1, max_states=1)
    holder.held.expect("r", [b"a", b"s"])
    assert holder.add(b"a") == [True]
    assert holder.add(b"s", is_state=True) == [True]
    assert holder.held.begin_read(b"s", False) is None, "a state is no block"


def test_a_block_that_is_being_read_is_not_released():
    holder = Holder()
    holder.held.expect("r", [b"a"])
    holder.add(b"a")
    assert holder.held.begin_read(b"a", False) is not None
    holder.time = 100.0
    holder.held.release_expired()
    holder.held.release_all()
    assert holder.released == []
    holder.held.end_read(b"a", "r", was_fetched=False)
    assert holder.released == [b"a"]


def test_discarded_blocks_are_not_found():
    holder = Holder()
    holder.held.expect("r", [b"a", b"b", b"c"])
    holder.add(b"a", b"b")
    assert holder.held.begin_read(b"a", False) is not None
    holder.held.discard([b"a", b"b", b"c"])
    assert holder.held.find([b"a", b"b"]) == [False, False]
    assert not holder.held.is_held(b"a")
    assert holder.released == [b"b"]
    assert holder.add(b"c") == [False]
    holder.held.end_read(b"a", "r", was_fetched=True)
    assert holder.released == [b"b", b"a"]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_keep_the_limits_and_release_each_save_once(seed):
    generator = random.Random(seed)
    holder = Holder(max_blocks=5)
    keys = [b"%d" % number for number in range(12)]
    reading: list[tuple[bytes, str]] = []
    num_added = 0
    for _ in range(1500):
        name = f"r{generator.randrange(6)}"
        match generator.randrange(7):
            case 0:
                holder.held.expect(name, generator.sample(keys, generator.randrange(1, 8)))
            case 1 | 2:
                key = generator.choice(keys)
                num_added += holder.held.add(HostBlock(key, keys.index(key)))
            case 3:
                key = generator.choice(keys)
                if holder.held.begin_read(key, False) is not None:
                    reading.append((key, name))
            case 4 if reading:
                key, reader = reading.pop(generator.randrange(len(reading)))
                holder.held.end_read(key, reader, was_fetched=generator.random() < 0.7)
            case 5:
                holder.time += generator.random() * 4
                holder.held.release_expired()
            case 6 if generator.random() < 0.3:
                holder.held.discard(generator.sample(keys, 2))
        holder.held.check_integrity()
    for key, reader in reading:
        holder.held.end_read(key, reader, was_fetched=True)
    holder.held.release_all()
    assert holder.held.num_held == 0
    assert len(holder.released) == num_added
