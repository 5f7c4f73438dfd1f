"""The load balancer follows what the replicas report of their prefix caches: simulated cores with real block pools."""

from __future__ import annotations

import random

from mvllm.engine.process.client_output_queues import ClientOutputQueues, SingleClientOutputQueue
from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_events.prefix_index import chunk_tokens, prefix_keys, root_key, sharing_keys
from mvllm.messages.kv_events import CacheChanges, merge_changes
from mvllm.messages.requests import EngineCoreOutputs, SchedulerStats

SIZE = 16
SHARED = list(range(4096))


class Core:
    """One replica: a KV cache that computes prompts at once."""

    def __init__(self, num_blocks: int = 2000) -> None:
        self.manager = KVCacheManager(num_blocks=num_blocks, block_size=SIZE)
        self.recorder = self.manager.record_events(with_events=False, with_changes=True)

    def compute(self, prompt: list[int], **keys: object) -> int:
        """Computes a prompt; returns how many tokens were cached."""
        table = self.manager.make_table(list(prompt), **keys)  # type: ignore[arg-type]
        found = self.manager.get_computed_blocks(table)
        assert self.manager.allocate_slots(table, len(prompt), found) is not None
        self.manager.free(table, len(prompt))
        return len(found) * SIZE

    def num_cached(self, prompt: list[int]) -> int:
        return len(self.manager.get_computed_blocks(self.manager.make_table([*prompt, 0]))) * SIZE

    def report(self, balancer: DPLoadBalancer, rank: int) -> None:
        if (changes := self.recorder.pop_changes()) is not None:
            balancer.update_cache(rank, changes)


class Replicas:
    """Several cores behind a balancer. Requests end at once, unless they are kept."""

    def __init__(self, count: int, num_blocks: int = 2000) -> None:
        self.cores = [Core(num_blocks) for _ in range(count)]
        self.balancer = DPLoadBalancer(count)
        self.balancer.set_cache_size(chunk_tokens(SIZE), num_blocks * SIZE)
        self.num_requests = 0

    def report(self) -> None:
        for rank, core in enumerate(self.cores):
            core.report(self.balancer, rank)
            self.balancer.update_load(rank, 0, self.num_requests)

    def send(self, prompt: list[int], *, computes: bool = True) -> int:
        self.num_requests += 1
        name = str(self.num_requests)
        rank = self.balancer.choose(prompt, None, 1, request_ids=[name])
        if computes:
            self.cores[rank].compute(prompt)
        self.report()
        self.balancer.finish_sequence(rank, name)
        return rank


def test_prompts_that_differ_behind_a_long_common_prefix_go_where_they_are_cached() -> None:
    replicas = Replicas(4)
    texts = {user: [*SHARED, *[user] * 512] for user in range(8)}
    homes = {user: replicas.send(text) for user, text in texts.items()}
    assert len(set(homes.values())) == 1  # all of them begin with what the first has left there
    for user, text in texts.items():
        rank = replicas.send([*text, *[99] * 100])
        assert rank == homes[user]
        assert replicas.balancer.num_cached_tokens(rank, text) == len(text)


def test_a_replica_that_is_overloaded_by_tokens_does_not_get_them() -> None:
    replicas = Replicas(3)
    home = replicas.send(SHARED)
    others = {0, 1, 2} - {home}
    replicas.balancer.update_load(home, 4000, 99)  # it waits less for these than for the prefix
    assert replicas.balancer.choose(SHARED, None, 1) == home
    replicas = Replicas(3)
    home = replicas.send(SHARED)
    others = {0, 1, 2} - {home}
    replicas.balancer.update_load(home, 5000, 99)
    assert replicas.balancer.choose(SHARED, None, 1) in others
    replicas.balancer.set_cache_size(64, 1_000_000)
    replicas.balancer.update_load(home, 0, 99, kv_cache_usage=0.2)  # 200,000 tokens: perhaps few long sequences
    assert replicas.balancer.choose(SHARED, None, 1) in others
    replicas.balancer.update_load(home, 0, 99, kv_cache_usage=0.01)
    assert replicas.balancer.choose(SHARED, None, 1) == home


def test_one_long_sequence_weighs_more_than_many_short_ones() -> None:
    balancer = DPLoadBalancer(2)
    balancer.set_cache_size(64, 1_000_000)
    long = balancer.choose(list(range(50_000)), None, 1, num_output_tokens=16)
    short = [balancer.choose([i] * 100, None, 1, num_output_tokens=16) for i in range(100)]
    assert short == [1 - long] * 100
    balancer.update_load(long, 0, 1, kv_cache_usage=0.05)  # computed: 50,000 tokens, which each step reads
    balancer.update_load(1 - long, 0, 100, kv_cache_usage=0.01)
    more = [balancer.choose([i] * 100, None, 1, num_output_tokens=16) for i in range(10)]
    assert more == [1 - long] * 10


def test_evicted_prefixes_are_not_expected_any_more() -> None:
    replicas = Replicas(2, num_blocks=300)  # 4,800 tokens
    home = replicas.send(SHARED)
    assert replicas.balancer.num_cached_tokens(home, SHARED) == 4096
    rng = random.Random(0)
    core = replicas.cores[home]
    for _ in range(6):
        core.compute([rng.randrange(1000) for _ in range(1000)])
    replicas.report()
    assert core.num_cached(SHARED) == replicas.balancer.num_cached_tokens(home, SHARED) == 0
    assert not replicas.balancer._sent.keys(home)


def test_a_prompt_that_was_never_computed_is_not_expected() -> None:
    replicas = Replicas(2)
    replicas.send([5] * 100)
    replicas.send([6] * 100)
    home = replicas.send(SHARED, computes=False)  # aborted
    assert replicas.balancer.num_cached_tokens(home, SHARED) == 0


def test_a_prompt_counts_as_cached_while_it_waits() -> None:
    replicas = Replicas(2)
    replicas.send([5] * 100)
    replicas.send([6] * 100)
    rank = replicas.balancer.choose(SHARED, None, 1, request_ids=["a"])
    replicas.balancer.update_load(1 - rank, 3000, 0)
    assert replicas.balancer.choose(SHARED, None, 1, request_ids=["b"]) == rank
    replicas.cores[rank].compute(SHARED)
    replicas.report()
    for name in "ab":
        replicas.balancer.finish_sequence(rank, name)
    assert replicas.balancer.num_cached_tokens(rank, SHARED) == 4096
    assert not replicas.balancer._prompts and replicas.balancer._output_tokens == [0, 0]


def test_prompts_of_other_front_ends_count_for_some_seconds() -> None:
    now = 0.0
    balancer = DPLoadBalancer(2, clock=lambda: now)
    balancer.update_cache(1, CacheChanges())
    balancer.record_prefixes(1, prefix_keys(SHARED, 64))
    assert balancer.num_cached_tokens(1, SHARED) == 4096
    now = 11.0
    balancer.choose([1], None, 1)
    assert balancer.num_cached_tokens(1, SHARED) == 0


def test_reported_chunks_are_those_of_the_cache_after_any_schedule() -> None:
    """A chunk is known where its last block is cached."""
    rng = random.Random(3)
    core, balancer = Core(num_blocks=60), DPLoadBalancer(1)
    balancer.set_cache_size(64, 60 * SIZE)
    prompts = [[rng.randrange(2)] * 64 + [rng.randrange(2) for _ in range(rng.randrange(300))] for _ in range(40)]
    pending: CacheChanges | None = None
    for _ in range(400):
        prompt, salt = rng.choice(prompts), rng.choice((None, "a"))
        if rng.random() < 0.02:
            core.manager.reset_prefix_cache()
        else:
            core.compute(prompt, cache_salt=salt)
        pending = merge_changes(pending, core.recorder.pop_changes())  # what a client gets that is updated rarely
        if pending is not None and rng.random() < 0.3:
            balancer.update_cache(0, pending)
            pending = None
            for text in prompts:
                for key in (None, "a"):
                    table = core.manager.make_table(text, cache_salt=key)
                    hashes = core.manager._block_hashes(table, len(text) // SIZE)
                    keys = prefix_keys(text, 64, root_key(sharing_keys(key)))
                    cached = core.manager._pool._block_by_hash
                    assert [balancer._reported.has(0, each) for each in keys] == [
                        hashes[4 * i + 3] in cached for i in range(len(keys))
                    ]


def test_keys_agree_with_those_of_the_core_for_salts_adapters_and_rotations() -> None:
    core, balancer = Core(), DPLoadBalancer(1)
    adapter = [("lora_name", "a"), ("lora_int_id", "7"), ("lora_path", "/a")]
    core.compute(SHARED[:128], cache_salt="s", position_key=2, adapter_keys=adapter)
    core.report(balancer, 0)
    for salt, keys, position, found in (("s", adapter, 2, True), ("s", adapter, 0, False), (None, adapter, 2, False)):
        chunks = balancer._prefix_keys(SHARED[:128], salt, keys, position)
        assert [balancer._reported.has(0, key) for key in chunks] == [found] * 2


def updates(queue: object) -> list[tuple[int, CacheChanges | None]]:
    items = [queue.get() for _ in range(queue.qsize())]  # type: ignore[attr-defined]
    return [(index, update.cache_changes) for index, update in items]


def test_every_front_end_gets_all_changes_once() -> None:
    import queue

    output: queue.SimpleQueue = queue.SimpleQueue()  # type: ignore[type-arg]
    queues = ClientOutputQueues(output, 3)
    queues.drop_client(2)
    queues.publish(EngineCoreOutputs(stats=SchedulerStats(), cache_changes=CacheChanges(stored=[1, 2])), is_busy=True)
    queues.publish(EngineCoreOutputs(stats=SchedulerStats(), cache_changes=CacheChanges(removed=[1])), is_busy=True)
    queues.publish(EngineCoreOutputs(stats=SchedulerStats()), is_busy=False)
    got: dict[int, CacheChanges | None] = {}
    for index, changes in updates(output):
        got[index] = merge_changes(got.get(index), changes)
    assert set(got) == {0, 1}
    for changes in got.values():
        assert changes is not None and changes.stored == [2] and changes.removed == [1]
    queues.publish(EngineCoreOutputs(stats=SchedulerStats()), is_busy=False)
    assert updates(output) == []

    single = SingleClientOutputQueue(output)
    for number in range(3):
        changes = CacheChanges(stored=[number])
        single.publish(EngineCoreOutputs(stats=SchedulerStats(), cache_changes=changes), is_busy=number < 2)
    assert sorted(key for _, each in updates(output) if each is not None for key in each.stored) == [0, 1, 2]


def test_merged_changes_are_those_of_both() -> None:
    first, then = CacheChanges(stored=[1, 2], removed=[3]), CacheChanges(stored=[3], removed=[1, 4])
    merged = merge_changes(first, then)
    assert merged is not None and (sorted(merged.stored), sorted(merged.removed)) == ([2, 3], [1, 4])
    cleared = CacheChanges(cleared=True, stored=[9])
    assert merge_changes(first, cleared) == cleared and merge_changes(None, first) == first
    assert merge_changes(cleared, then) == CacheChanges(cleared=True, stored=[9, 3])
