"""A subscriber knows what the device, the host blocks and a connector's store have, exactly, in random schedules."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm.config.kv_events import KVEventsConfig
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_events.block_index import KVBlockIndex
from mvllm.kv_events.publisher import KVEventPublisher
from mvllm.kv_events.subscriber import KVEventSubscriber
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.messages.kv_events import DEVICE, DISK, HOST, BlockRemoved, BlockStored, KVCacheEvent
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.disturbances import disturb
from tests.unit.scheduler.fake_connector import FakeConnector
from tests.unit.scheduler.test_random_kv_tiers import ACTIONS, Limits
from tests.unit.scheduler.test_random_state_traffic import random_request

SEEN: Counter[str] = Counter()


def of_first_group(keys: object) -> set[bytes]:
    return {key for key in keys if len(key) == 32}  # type: ignore[attr-defined]


class Watched:
    """An engine with a host tier and a connector, and what a subscriber should know of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv_cache = engine.scheduler._kv_cache
        self.store = engine.connector.store
        self.recorder = self.kv_cache.record_events(with_events=True, with_changes=False)
        self.root = self.kv_cache._root
        self.unreachable: set[bytes] = set()  # stored under an earlier root
        self.events: list[KVCacheEvent] = []

    def pop_events(self) -> list[KVCacheEvent]:
        self.engine.scheduler.kv_loads.record_changes()
        self.events = self.recorder.pop_events()
        return self.events

    def note_root(self, store_before: set[bytes]) -> None:
        """After each action: a new root makes what was stored before unreachable."""
        if self.kv_cache._root != self.root:
            self.root = self.kv_cache._root
            self.unreachable = set() if self.root == self.kv_cache._first_root else store_before
        self.unreachable &= set(self.store)

    def check(self, index: KVBlockIndex) -> None:
        tier = self.kv_cache.tier
        assert index.hashes(DEVICE) == of_first_group(self.kv_cache._pool._block_by_hash)
        assert index.hashes(HOST) == of_first_group(tier.blocks.host._by_key)
        can_be_read = of_first_group(self.store) if self.engine.scheduler.kv_loads._connectors.names else set()
        assert index.hashes(DISK) == can_be_read - self.unreachable
        tokens = {
            block_hash: tuple(request.token_ids[i * self.kv_cache.block_size : (i + 1) * self.kv_cache.block_size])
            for request in self.engine.requests
            for i, block_hash in enumerate(request.table.block_hashes)
        }
        for block_hash, block in index.blocks.items():
            if block.token_ids or block.media != (DISK,):
                assert block.token_ids == tokens.get(block_hash, block.token_ids)
                assert len(block.token_ids) == self.kv_cache.block_size
            SEEN[f"blocks in {block.media}"] += 1


def watch_random_schedule(seed: int, publisher: KVEventPublisher, subscriber: KVEventSubscriber, number: int) -> int:
    """Runs a schedule; returns the number of the next batch."""
    dice = random.Random(seed)
    limits = Limits(dice)
    store: dict[bytes, object] = {bytes([i]) * 32: "of an earlier run" for i in range(dice.choice([0, 3]))}
    engine = limits.make_engine(dice, store)
    engine.connector.medium = DISK
    watched = Watched(engine)
    scheduler, added, aborted, prompts = engine.scheduler, {}, set(), []
    publisher.publish([])  # its first batch clears what the last engine had
    for _ in range(dice.randint(8, 30)):
        [action] = dice.choices([*ACTIONS, "restore"], [*ACTIONS.values(), 0.3])
        before = set(store)
        if action in ("add", "again"):
            request = random_request(dice, len(added), prompts, limits)
            if action == "again" and len(prompts) > 1:
                request.prompt_token_ids = dice.choice(prompts)
            added[request.request_id] = request
            engine.add(request)
        elif action == "step":
            for _ in range(dice.randint(1, 4)):
                engine.step()
        elif action == "restore":
            if not scheduler.has_requests():
                scheduler.restore_root()
        else:
            disturb(
                action,
                dice,
                engine,
                added,
                aborted,
                lambda: scheduler.reset_prefix_cache(keeps_tiers=dice.random() < 0.5),
            )
            SEEN[action] += 1
        watched.note_root(before & set(store))
        if events := watched.pop_events():
            publisher.publish(events)
            number += 1
        if dice.random() < 0.5:
            catch_up(subscriber, number)
            watched.check(subscriber.index)
    catch_up(subscriber, number)
    watched.check(subscriber.index)
    return number


def catch_up(subscriber: KVEventSubscriber, number: int) -> None:
    deadline = time.monotonic() + 120
    while subscriber.next_number < number or not subscriber.is_exact:
        assert time.monotonic() < deadline
        subscriber.poll(0.02)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=5
    )


def run_schedules(config: KVEventsConfig, seeds: range) -> None:
    for seed in seeds:
        publisher = KVEventPublisher(config)
        subscriber = KVEventSubscriber(config.endpoint, config.replay_endpoint, check_seconds=0.02)
        try:
            number = watch_random_schedule(seed, publisher, subscriber, 1)
            later = KVEventSubscriber(config.endpoint, config.replay_endpoint, check_seconds=0.02)
            catch_up(later, number)  # from a snapshot
            for medium in (DEVICE, HOST, DISK):
                assert later.index.hashes(medium) == subscriber.index.hashes(medium)
            assert {name: block.token_ids for name, block in later.index.blocks.items()} == {
                name: block.token_ids for name, block in subscriber.index.blocks.items()
            }
            later.close()
        finally:
            subscriber.close()
            publisher.close()


def test_the_index_is_that_of_all_media(config: KVEventsConfig) -> None:
    run_schedules(config, range(25))
    assert {"blocks in ('device', 'host')", "blocks in ('disk',)", "reset", "fail"} <= set(SEEN)


@pytest.mark.exhaustive
def test_the_index_is_that_of_all_media_in_a_thousand_schedules(config: KVEventsConfig) -> None:
    run_schedules(config, range(1000, 2000))


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Two device blocks too few for two prompts, and a store with everything that was computed."""
    connector = FakeConnector()
    connector.medium = DISK
    engine = Engine(
        make_scheduler(
            num_blocks=8,
            host_tier=HostTier(3),
            connectors=KVConnectors({"fake": (connector, "both")}),
        )
    )
    connector.engine = engine
    engine.connector = connector
    yield Watched(engine)


def settle(watched: Watched) -> list[KVCacheEvent]:
    """All events until nothing is left to be saved."""
    events: list[KVCacheEvent] = []
    for _ in range(6):
        watched.engine.step()
        events += watched.pop_events()
    return events


def test_a_block_is_stored_in_host_memory_and_on_disk_with_its_tokens(watched: Watched) -> None:
    prompt = list(range(100, 109))
    watched.engine.run(make_request(prompt, request_id="a", max_tokens=1))
    events = watched.pop_events() + settle(watched)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.medium for event in stored] == [DEVICE, HOST, DISK]
    for event in stored:
        assert event.token_ids == prompt[:8] and event.parent_block_hash is None
        assert event.block_hashes == stored[0].block_hashes


def test_blocks_of_an_earlier_run_get_their_tokens_when_they_are_loaded(watched: Watched) -> None:
    prompt = list(range(100, 109))
    index = KVBlockIndex()
    watched.engine.run(make_request(prompt, request_id="a", max_tokens=1))
    index.apply(watched.pop_events() + settle(watched))
    stored = set(watched.store)
    assert index.hashes(DISK) == stored
    # As after a restart: neither the device nor host memory has anything, and the recorder knows no tokens.
    watched.kv_cache._pool.evict_all()
    watched.kv_cache.tier.clear()
    watched.recorder.clear()
    watched.engine.scheduler.restore_root()
    index.apply(watched.pop_events())
    assert {name: block.token_ids for name, block in index.blocks.items()} == dict.fromkeys(stored, ())
    watched.engine.add(make_request(prompt, request_id="b", max_tokens=1))
    for _ in range(2):
        watched.engine.scheduler.kv_loads.start_plan()  # starts the loads, and takes their results
    assert len(watched.engine.connector.loaded) == 2
    index.apply(watched.pop_events())  # before a plan has loaded them to the device
    assert not index.hashes(DEVICE) and index.hashes(HOST) == stored
    watched.engine.run()
    index.apply(watched.pop_events() + settle(watched))
    assert [block.token_ids for block in index.blocks.values()] == [tuple(prompt[:4]), tuple(prompt[4:8])]
    assert all({DEVICE, HOST, DISK} == set(block.media) for block in index.blocks.values())


def test_eviction_from_host_memory_is_reported(watched: Watched) -> None:
    for first in (100, 200):
        watched.engine.run(make_request(list(range(first, first + 9)), request_id=str(first), max_tokens=1))
        settle(watched)
    index = KVBlockIndex()
    watched.engine.run(make_request(list(range(300, 309)), request_id="c", max_tokens=1))
    events = watched.pop_events() + settle(watched)
    index.apply(events)
    removed = [event for event in events if isinstance(event, BlockRemoved) and event.medium == HOST]
    assert sum(len(event.block_hashes) for event in removed) == 2
    assert index.hashes(HOST) <= set(watched.kv_cache.tier.blocks.host._by_key)


def test_sleep_keeps_host_blocks_and_new_weights_keep_nothing(watched: Watched) -> None:
    watched.engine.run(make_request(list(range(100, 109)), request_id="a", max_tokens=1))
    index = KVBlockIndex()
    index.apply(watched.pop_events() + settle(watched))
    hashes = index.hashes(DEVICE)
    assert len(hashes) == 2
    assert watched.engine.scheduler.reset_prefix_cache(keeps_tiers=True)
    index.apply(watched.pop_events())
    assert not index.hashes(DEVICE) and index.hashes(HOST) == index.hashes(DISK) == hashes
    watched.engine.scheduler.forget_computed(restart=True)
    index.apply(watched.pop_events())
    assert not index.blocks
    watched.engine.scheduler.restore_root()  # the weights of the start again
    index.apply(watched.pop_events())
    assert index.hashes(DISK) == hashes and not index.hashes(HOST)
