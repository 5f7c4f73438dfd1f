"""Random traffic with a host tier and a connector, under random limits, delays, failures and preemptions.

The fake runner checks each block and state that a request reads, and that no plan uses a host block that a connector
fills or reads. At the end every request has the tokens that it gets alone, and every host block, and everything in the
connector's store, has the contents of its key.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from mvllm.kv_cache.host_tier import HostTier, tier_key
from mvllm.kv_cache.prefix_search import group_hash
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.scheduler.swapping import CopyCosts
from tests.unit.scheduler.builders import Engine, make_scheduler
from tests.unit.scheduler.disturbances import disturb
from tests.unit.scheduler.fake_connector import FakeConnector
from tests.unit.scheduler.fake_runner import GROUP, fingerprints, first_print
from tests.unit.scheduler.test_random_state_traffic import random_request
from tests.unit.scheduler.test_random_traffic import check_result
from tests.unit.scheduler.test_speculative import make_proposer

MAX_MODEL_LEN = 32
ACTIONS = {"add": 8, "step": 10, "abort": 2, "fail": 0.5, "lose": 0.3, "reset": 0.4, "again": 4}

SEEN: Counter[str] = Counter()
"""What happened in all schedules."""


class Limits:
    """Random limits of an engine."""

    def __init__(self, dice: random.Random) -> None:
        self.has_states = dice.random() < 0.4
        self.has_drafts = dice.random() < 0.2
        self.num_stages = dice.choice([1, 1, 1, 2])
        self.depth = self.num_stages if self.has_drafts else max(self.num_stages, dice.choice([1, 1, 2, 3]))
        self.enable_chunked_prefill = dice.random() < 0.9
        self.max_num_batched_tokens = dice.choice([3, 5, 8, 16, 40]) if self.enable_chunked_prefill else 80
        self.max_num_seqs = dice.randint(1, 6)
        self.num_state_slots = dice.choice([2, 3, 4, 6, 9]) if self.has_states else 0
        self.settings = {
            "num_blocks": dice.choice([9, 10, 12, 20, 30]),
            "block_size": dice.choice([1, 2, 4, 4, 5]),
            "policy": dice.choice(["fcfs", "fcfs", "priority"]),
            "windows": dice.choice([(None,), (None,), (None,), (3,), (None, 4), (2, 9)]),
            "state_snapshot_interval": dice.choice([0, 4, 8]),
            "least_snapshot_distance": dice.choice([1, 4]),
            "long_prefill_slowdown": dice.choice([None, None, 3.0]),
        }
        self.host_blocks = dice.choice([1, 3, 8, 20, 60, 200])
        self.tier_settings = {
            "num_states": dice.choice([1, 2, 6, 30]) if self.has_states else 0,
            "max_saved_blocks": dice.choice([1, 2, 16]),
            "max_saved_states": dice.choice([1, 4]),
            "saves_evicted": dice.random() < 0.7,
        }
        self.preemption_mode = dice.choice(["swap", "swap", "auto", "recompute"])
        self.role = dice.choice(["both", "both", "both", "producer", "consumer", None])
        self.seed = dice.randrange(1000)
        self.plans_ahead = self.has_drafts and self.num_stages == 1 and self.seed % 4 > 0
        if self.plans_ahead:
            self.depth = 1 + self.seed % 4

    def make_engine(self, dice: random.Random, store: dict | None = None) -> Engine:
        connector = FakeConnector(store, dice)
        ticks = itertools.count()
        scheduler = make_scheduler(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            num_stages=self.num_stages,
            num_state_slots=self.num_state_slots,
            num_speculative_tokens=3 if self.has_drafts else 0,
            workers_keep_drafts=self.plans_ahead,
            clock=lambda: next(ticks) % 97 + 0.01,
            host_tier=HostTier(self.host_blocks, **self.tier_settings),
            connectors=KVConnectors({} if self.role is None else {"fake": (connector, self.role)}),
            preemption_mode=self.preemption_mode,
            copy_costs=CopyCosts(dice.choice([1, 1000]), 5, 100.0),
            **self.settings,
        )
        engine = Engine(scheduler, depth=self.depth)
        connector.engine = engine
        engine.connector = connector
        if self.has_drafts:
            engine.runner.propose = make_proposer(3, self.seed)
            engine.runner.keeps_drafts = self.plans_ahead
        return engine

    @property
    def can_pair(self) -> bool:
        has_room = self.max_num_seqs > 1 and (not self.has_states or self.num_state_slots > 2)
        return self.enable_chunked_prefill and has_room and not self.has_drafts


def contents_by_key(engine: Engine) -> dict[bytes, object]:
    """What the block or state of each key has, of all requests that the engine has seen; by the connectors' keys."""
    kv_cache, found = engine.scheduler._kv_cache, {}
    size = kv_cache.block_size
    for request in engine.requests:
        prints = fingerprints(request.token_ids, first_print(request.lora_int_id))
        for i, block_hash in enumerate(request.table.block_hashes):
            for group in range(kv_cache.num_groups):
                own = prints[i * size : (i + 1) * size]
                found[group_hash(block_hash, group)] = [each + group * GROUP for each in own]
            found[block_hash + b"\xff\xff"] = (request.lora_int_id, request.token_ids[: (i + 1) * size])
    return found


def check_contents(engine: Engine) -> None:
    """Raises AssertionError unless all that host blocks and the store have is what the keys say."""
    expected, tier = contents_by_key(engine), engine.scheduler._kv_cache.tier
    for key, index in tier.blocks.host._by_key.items():
        if key in expected:  # those of an earlier root are never found again
            assert engine.runner.host[index] == expected[key], f"host block {index} is wrong"
            SEEN["checked"] += 1
    if tier.states is not None:
        for key, index in tier.states.host._by_key.items():
            if key + b"\xff\xff" in expected:
                assert engine.runner.host_states[index] == expected[key + b"\xff\xff"], f"state {index} is wrong"
                SEEN["checked states"] += 1
    for key, content in engine.connector.store.items():
        if key in expected:
            assert content == expected[key], f"the store has a wrong {'state' if tier_key(key)[1] else 'block'}"


def run_random_schedule(seed: int) -> None:
    dice = random.Random(seed)
    limits = Limits(dice)
    engine = limits.make_engine(dice)
    added, aborted, prompts = {}, set(), []
    scheduler = engine.scheduler

    def reset_prefix_cache() -> None:
        scheduler.reset_prefix_cache(keeps_tiers=dice.random() < 0.5)

    for _ in range(dice.randint(8, 50)):
        [action] = dice.choices(list(ACTIONS), list(ACTIONS.values()))
        if action in ("add", "again"):
            request = random_request(dice, len(added), prompts, limits)
            if action == "again" and len(prompts) > 1:
                request.prompt_token_ids = dice.choice(prompts)
            added[request.request_id] = request
            engine.add(request)
        elif action == "step":
            for _ in range(dice.randint(1, 6)):
                engine.step()
                stats = scheduler.make_stats()
                SEEN["steps with swapped"] += stats.num_swapped > 0
                SEEN["steps with waits"] += stats.num_waiting_for_kv > 0
        else:
            disturb(action, dice, engine, added, aborted, reset_prefix_cache)
    engine.run(max_steps=3000)
    may_fail = bool(engine.runner.failing or engine.runner.steps_without_memory)
    for name, request in added.items():
        check_result(engine, request, limits, ended_early=name in aborted, may_fail=may_fail)
    check_contents(engine)

    engine.runner.failing.clear()
    engine.runner.steps_without_memory.clear()
    for request in added.values():  # again, from what is left
        request.request_id += "-again"
        engine.run(request)
        check_result(engine, request, limits, ended_early=False, may_fail=False)
    check_contents(engine)
    count(engine)
    store = engine.connector.store
    if limits.role == "both" and store and scheduler._kv_cache._root == scheduler._kv_cache._first_root:
        other = limits.make_engine(dice, store)  # after a restart
        for request in list(added.values())[:6]:
            request.request_id += "-restarted"
            other.run(request)
            check_result(other, request, limits, ended_early=False, may_fail=False)
        SEEN["found after a restart"] += len(other.connector.loaded)
        check_contents(other)
    engine.step()
    assert not engine.runner.rows


def count(engine: Engine) -> None:
    tier = engine.scheduler._kv_cache.tier
    SEEN.update(
        schedules=1,
        preemptions=engine.scheduler.make_stats().num_preemptions,
        saved=tier.blocks.num_saved,
        loaded=tier.blocks.num_loaded,
        stored=len(engine.connector.saved),
        fetched=len(engine.connector.loaded),
        states_loaded=0 if tier.states is None else tier.states.num_loaded,
    )


@pytest.mark.parametrize("seed", range(0, 100, 25))
def test_every_request_reads_what_it_should_with_tiers(seed):
    for each in range(seed, seed + 25):
        run_random_schedule(each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1000, 11_000, 500))
def test_every_request_reads_what_it_should_with_tiers_in_ten_thousand_schedules(seed):
    for each in range(seed, seed + 500):
        run_random_schedule(each)
