"""A subscriber rebuilds the index of a KV cache exactly from its events: real sockets, random schedules."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mvllm.config.kv_events import KVEventsConfig
from mvllm.errors import ConfigError, MvllmError
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_events.publisher import KVEventPublisher
from mvllm.kv_events.replay_protocol import END, TOO_OLD, number_bytes
from mvllm.kv_events.subscriber import KVEventSubscriber
from mvllm.messages.kv_events import DEVICE, HOST, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

SIZE = 4


class Cache:
    """A KV cache with random requests, and the publisher of its events."""

    def __init__(
        self,
        config: KVEventsConfig,
        *,
        num_blocks: int = 40,
        windows: tuple[int | None, ...] = (None,),
        tier: HostTier | None = None,
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks=num_blocks, block_size=SIZE, windows=windows, max_step_tokens=8 * SIZE, tier=tier
        )
        self.recorder = self.manager.record_events(with_events=True, with_changes=False)
        self.publisher = KVEventPublisher(config)
        self.tables: list[BlockTable] = []
        self.num_batches = 0
        self.step = 0

    def close(self) -> None:
        self.publisher.close()

    def run_request(self, tokens: list[int], salt: str | None = None) -> BlockTable | None:
        manager = self.manager
        table = manager.make_table(tokens, cache_salt=salt)
        found = manager.get_computed_blocks(table)
        if manager.allocate_slots(table, len(tokens), found) is None:
            return None
        manager.cache_blocks(table, len(tokens))
        return table

    def random_step(self, rng: random.Random) -> None:
        """One change of the cache: a request, its end, its failure, or a reset."""
        what = rng.random()
        if what < 0.7 or not self.tables:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * SIZE))]
            if (table := self.run_request(tokens, rng.choice((None, None, "pepper")))) is not None:
                self.tables.append(table)
            elif self.tables:
                self.free(self.tables.pop(0))
        elif what < 0.9:
            self.free(self.tables.pop(rng.randrange(len(self.tables))))
        elif what < 0.95:
            failed = self.tables.pop(rng.randrange(len(self.tables)))
            for dependent in self.manager.discard([failed]):
                self.tables.remove(dependent)
        else:
            while self.tables:
                self.free(self.tables.pop())
            self.manager.reset_prefix_cache()
        if self.manager.unconfirmed.writers:
            self.manager.unconfirmed.end_plan(self.step)
        self.manager.confirm(self.step - 1)
        self.step += 1
        self.publish()

    def free(self, table: BlockTable) -> None:
        self.manager.free(table, len(table.token_ids))

    def publish(self) -> None:
        if events := self.recorder.pop_events():
            self.publisher.publish(events)
            self.num_batches += 1

    @property
    def hashes(self) -> set[bytes]:
        return {name for name in self.manager._pool._block_by_hash if len(name) == 32}


def catch_up(subscriber: KVEventSubscriber, cache: Cache) -> None:
    """Polls until the subscriber has applied all batches of the cache."""
    deadline = time.monotonic() + 120
    while subscriber.next_number < cache.num_batches or not subscriber.is_exact:
        assert time.monotonic() < deadline, (subscriber.next_number, cache.num_batches)
        subscriber.poll(0.02)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    return KVEventsConfig(
        True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=20
    )


@pytest.fixture
def cache(config: KVEventsConfig) -> Iterator[Cache]:
    cache = Cache(config)
    yield cache
    cache.close()


@pytest.fixture
def subscriber(config: KVEventsConfig) -> Iterator[KVEventSubscriber]:
    subscriber = KVEventSubscriber(config.endpoint, config.replay_endpoint, check_seconds=0.02)
    yield subscriber
    subscriber.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_the_caches_after_every_batch(cache: Cache, subscriber: KVEventSubscriber, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        for _ in range(rng.randrange(1, 12)):
            cache.random_step(rng)
        catch_up(subscriber, cache)
        assert subscriber.index.hashes(DEVICE) == cache.hashes
    for block_hash, block in subscriber.index.blocks.items():
        assert len(block.token_ids) == SIZE
        if block.parent in subscriber.index.blocks:
            assert subscriber.index.blocks[block.parent].key == block.key, block_hash
    cache.manager.check_integrity()


def test_missed_batches_are_sent_again_and_too_old_ones_are_replaced_by_a_snapshot(
    cache: Cache, subscriber: KVEventSubscriber
) -> None:
    rng = random.Random(7)
    catch_up(subscriber, cache)
    assert (subscriber.num_snapshots, subscriber.num_replayed) == (1, 0)
    connected, unconnected = subscriber._sub, subscriber._context.socket(zmq.SUB)
    for num_missed, num_snapshots in ((5, 1), (15, 1), (100, 2), (3, 2)):
        before = cache.num_batches
        subscriber._sub = unconnected
        while cache.num_batches < before + num_missed:
            cache.random_step(rng)
        catch_up(subscriber, cache)
        assert subscriber.index.hashes(DEVICE) == cache.hashes
        assert subscriber.num_snapshots == num_snapshots
        subscriber._sub = connected  # where all of them arrive a second time
        cache.random_step(rng)
        catch_up(subscriber, cache)
        assert subscriber.index.hashes(DEVICE) == cache.hashes
    assert subscriber.num_replayed >= 5 + 15 + 3


def test_a_restarted_client_begins_with_a_snapshot(cache: Cache, config: KVEventsConfig) -> None:
    rng = random.Random(1)
    for _ in range(4):
        for _ in range(25):
            cache.random_step(rng)
        client = KVEventSubscriber(config.endpoint, config.replay_endpoint, check_seconds=0.02)
        catch_up(client, cache)
        cache.random_step(rng)
        catch_up(client, cache)
        assert client.index.hashes(DEVICE) == cache.hashes
        client.close()


@pytest.mark.parametrize("num_batches", [2, 60])
def test_a_restarted_engine_is_noticed_whatever_its_numbers_are(
    config: KVEventsConfig, subscriber: KVEventSubscriber, num_batches: int
) -> None:
    """Also if the new engine has published more batches than the old one before the subscriber receives one."""
    rng = random.Random(2)
    cache = Cache(config)
    while cache.num_batches < 30:
        cache.random_step(rng)
    catch_up(subscriber, cache)
    cache.close()
    cache = Cache(config)
    while cache.num_batches < num_batches:
        cache.random_step(rng)
    deadline = time.monotonic() + 120
    while subscriber._publisher != cache.publisher.publisher:
        assert time.monotonic() < deadline
        subscriber.poll(0.02)
    catch_up(subscriber, cache)
    assert subscriber.index.hashes(DEVICE) == cache.hashes
    cache.close()


def test_an_engine_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    client = KVEventSubscriber(f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b", reply_seconds=0.05)
    with pytest.raises(MvllmError, match=r"does not answer within 0\.05 s"):
        client.poll(0.01)
    client.close()


def test_without_replay_the_index_says_whether_it_is_exact(tmp_path: Path) -> None:
    hashes = [bytes([i]) * 32 for i in range(5)]
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.bind(f"ipc://{tmp_path}/events")
        client = KVEventSubscriber(f"ipc://{tmp_path}/events")
        assert pub.recv() == b"\1"  # its subscription
        for number, block_hash in enumerate(hashes):
            if number != 3:
                batch = KVEventBatch(0.0, [BlockStored([block_hash], None, [1] * SIZE, SIZE, medium=DEVICE)])
                pub.send_multipart((b"", number_bytes(number), msgspec.msgpack.encode(batch)))
        while client.next_number < 3:
            assert client.poll(120.0)
            assert client.is_exact == (client.next_number <= 3)
        while client.next_number < 5:
            assert client.poll(120.0)
        assert not client.is_exact and client.index.hashes(DEVICE) == {*hashes[:3], hashes[4]}
        client.close()


def test_blocks_of_windows_count_when_the_first_group_has_them(config: KVEventsConfig) -> None:
    cache = Cache(config, num_blocks=60, windows=(None, 2 * SIZE))
    client = KVEventSubscriber(config.endpoint, config.replay_endpoint)
    rng = random.Random(4)
    for _ in range(60):
        cache.random_step(rng)
    catch_up(client, cache)
    assert client.index.hashes(DEVICE) == cache.hashes and cache.hashes
    cache.close()
    client.close()


def test_a_failed_request_takes_its_blocks_back(cache: Cache, subscriber: KVEventSubscriber) -> None:
    good = cache.run_request([1] * 3 * SIZE)
    assert good is not None
    cache.manager.unconfirmed.end_plan(0)
    cache.manager.confirm(0)
    cache.publish()
    kept = set(cache.hashes)
    bad = cache.run_request([2] * 3 * SIZE)
    assert bad is not None
    cache.publish()
    catch_up(subscriber, cache)
    assert len(subscriber.index.blocks) == 6
    cache.manager.discard([bad])
    cache.publish()
    catch_up(subscriber, cache)
    assert subscriber.index.hashes(DEVICE) == kept == cache.hashes


def test_other_media_have_their_own_blocks(config: KVEventsConfig, subscriber: KVEventSubscriber) -> None:
    cache = Cache(config, tier=HostTier(4))
    table = cache.run_request([1] * 3 * SIZE)
    assert table is not None
    cache.publish()
    cache.recorder.record_stored(table.block_hashes[:3], HOST)
    cache.recorder.record_removed(table.block_hashes[1:2], DEVICE)
    cache.recorder.record_removed(table.block_hashes[2:3], DEVICE)
    cache.recorder.record_removed(table.block_hashes[2:3], HOST)
    cache.publish()
    catch_up(subscriber, cache)
    first, second, _ = table.block_hashes
    assert subscriber.index.hashes(DEVICE) == {first} and subscriber.index.hashes(HOST) == {first, second}
    later = KVEventSubscriber("ipc:///nowhere", subscriber._replay_endpoint)
    catch_up(later, cache)  # from a snapshot
    assert later.index.hashes(DEVICE) == {first} and later.index.hashes(HOST) == {first, second}
    later.close()
    cache.close()


def test_messages_have_the_format_of_other_engines(cache: Cache, config: KVEventsConfig) -> None:
    """A reader that knows nothing of mvllm: plain msgpack arrays, and a replay asked for by a number alone."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.connect(config.endpoint)
        cache.publisher.publish([AllBlocksCleared()])
        while not sub.poll(50):  # until it has subscribed
            cache.publisher.publish([AllBlocksCleared()])
        first = int.from_bytes(sub.recv_multipart()[1], "big")
        while sub.poll(50):
            first = int.from_bytes(sub.recv_multipart()[1], "big")
        table = cache.run_request([1] * SIZE + [2] * SIZE, "pepper")
        assert table is not None
        cache.publish()
        assert sub.poll(120_000)
        topic, number, payload = sub.recv_multipart()
        assert (topic, number) == (b"", number_bytes(first + 1))
        ts, events, rank, publisher = msgspec.msgpack.decode(payload)
        assert abs(time.time() - ts) < 60 and rank == 0 and publisher == cache.publisher.publisher
        [[name, hashes, parent, tokens, size, lora_id, medium, lora_name, extra]] = events
        assert (name, parent, size, lora_id, medium, lora_name) == ("BlockStored", None, SIZE, None, "device", None)
        assert hashes == table.block_hashes and tokens == [1] * SIZE + [2] * SIZE
        assert extra == [[extra[0][0]]] * 2 and "pepper" not in extra[0][0]
        for event in ([AllBlocksCleared()], [BlockRemoved([b"x" * 32], DEVICE)]):
            cache.publisher.publish(event)
        _, number, payload = sub.recv_multipart()
        assert (number, msgspec.msgpack.decode(payload)[1]) == (number_bytes(first + 2), [["AllBlocksCleared"]])
        _, number, payload = sub.recv_multipart()
        assert msgspec.msgpack.decode(payload)[1] == [["BlockRemoved", [b"x" * 32], "device"]]

    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.connect(config.replay_endpoint)

        def ask(*frames: bytes) -> list[bytes]:
            replay.send_multipart((b"", *frames))
            numbers = []
            while True:
                assert replay.poll(120_000)
                _, number, payload = replay.recv_multipart()
                numbers.append(number)
                if not payload:
                    return numbers

        last = first + 3
        assert ask(number_bytes(last - 1)) == [number_bytes(last - 1), number_bytes(last), END]
        assert ask(number_bytes(last + 1)) == [END]
        assert ask(number_bytes(last + 2)) == [TOO_OLD]
        assert ask(number_bytes(last), number_bytes(4711)) == [TOO_OLD]
        assert ask(b"nonsense?") == [END] and ask(b"") == [END]
        for _ in range(30):
            cache.publisher.publish([AllBlocksCleared()])
        deadline = time.monotonic() + 120
        while ask(number_bytes(last)) != [TOO_OLD]:
            assert time.monotonic() < deadline
        while len(ask(number_bytes(last + 11))) != 20 + 1:
            assert time.monotonic() < deadline


def test_an_address_in_use_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"endpoint tcp://127\.0\.0\.1:{port} cannot be bound"):
            KVEventPublisher(KVEventsConfig(True, endpoint=f"tcp://127.0.0.1:{port - 1}"), rank=1)


def test_closing_twice_is_permitted_and_publishing_never_waits(config: KVEventsConfig) -> None:
    publisher = KVEventPublisher(config)
    event = BlockStored([b"h" * 32], None, [1] * SIZE, SIZE, medium=DEVICE)
    for _ in range(3000):  # nobody reads
        publisher.publish([event])
    publisher.close()
    publisher.close()
