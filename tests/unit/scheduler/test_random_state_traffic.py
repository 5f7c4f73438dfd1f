"""Random traffic of a model with sequence states, under random limits.

A fake runner (`state_runner.py`) knows the exact tokens that every state has consumed. It raises if a row reads another
state, or writes where another row reads. At the end every request has the tokens that it gets alone, every snapshot
holds what its hash says, and no slot is in use.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mvllm.messages.requests import FinishReason
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.disturbances import disturb
from tests.unit.scheduler.test_random_traffic import check_result
from tests.unit.scheduler.test_speculative import make_proposer

MAX_MODEL_LEN = 32
ACTIONS = {"add": 8, "siblings": 2, "step": 8, "abort": 2, "fail": 1, "lose": 0.4, "reset": 0.4}
"""With their weights: `fail` makes a request fail, `lose` a whole step."""

SEEN: Counter[str] = Counter()
"""What happened in all schedules."""


class Limits:
    """Random limits of an engine."""

    def __init__(self, dice: random.Random) -> None:
        self.has_drafts = dice.random() < 0.35
        self.num_stages = dice.choice([1, 1, 1, 2, 3])
        self.depth = self.num_stages if self.has_drafts else max(self.num_stages, dice.choice([1, 1, 2, 3]))
        self.enable_chunked_prefill = dice.random() < 0.9
        self.max_num_batched_tokens = dice.choice([2, 3, 5, 8, 16, 40])
        if not self.enable_chunked_prefill:
            self.max_num_batched_tokens = 80
        self.max_num_seqs = dice.randint(1, 6)
        self.num_state_slots = dice.choice([2, 3, 4, 6, 9, 20])
        self.settings = {
            "num_blocks": dice.choice([9, 12, 20, 60]),
            "block_size": dice.choice([1, 2, 4, 5]),
            "enable_caching": dice.random() < 0.85,
            "policy": dice.choice(["fcfs", "fcfs", "priority"]),
            "windows": dice.choice([(None,), (None,), (None,), (3,), (None, 4), (2, 9)]),
            "state_snapshot_interval": dice.choice([0, 3, 4, 8, 16]),
            "least_snapshot_distance": dice.choice([1, 4, 8]),
            "long_prefill_token_threshold": dice.choice([None, None, 0, 3, 8]),
        }
        self.seed = dice.randrange(1000)
        self.plans_ahead = self.has_drafts and self.num_stages == 1 and self.seed % 4 > 0
        if self.plans_ahead:
            self.depth = 1 + self.seed % 4

    def make_engine(self) -> Engine:
        scheduler = make_scheduler(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            num_stages=self.num_stages,
            num_state_slots=self.num_state_slots,
            num_speculative_tokens=3 if self.has_drafts else 0,
            workers_keep_drafts=self.plans_ahead,
            **self.settings,
        )
        engine = Engine(scheduler, depth=self.depth)
        if self.has_drafts:
            engine.runner.propose = make_proposer(3, self.seed)
            engine.runner.keeps_drafts = self.plans_ahead
        return engine

    @property
    def can_pair(self) -> bool:
        has_room = self.max_num_seqs > 1 and self.num_state_slots > 2
        return self.enable_chunked_prefill and has_room and not self.has_drafts


def random_request(dice: random.Random, number: int, prompts: list[list[int]], limits: Limits):
    prompt = [dice.choice([1, 1, 1, 2]) for _ in range(dice.randint(1, 20))]
    if prompts and dice.random() < 0.6:  # shares a prefix with an earlier prompt
        earlier = dice.choice(prompts)
        prompt = earlier[: dice.randint(1, len(earlier))] + prompt[: dice.randint(0, 4)]
    prompt = prompt[:26]
    prompts.append(prompt)
    companion = None
    if limits.can_pair and dice.random() < 0.15:
        companion = dice.choice(prompts)[: dice.randint(1, 20)]
    return make_request(
        prompt,
        request_id=f"r{number}",
        max_tokens=dice.choice([None, 1, 2, 5, 12]),
        eos=dice.choice([[], [], [7], list(range(0, 50, 9))]),
        priority=dice.randint(-1, 1),
        cache_salt=dice.choice([None, None, None, "a"]),
        sibling_group=dice.choice([None, None, f"g{number // 4}"]),
        prompt_logprobs=dice.choice([None, None, None, None, 1]),
        companion=companion,
    )


def run_random_schedule(seed: int) -> None:
    dice = random.Random(seed)
    limits = Limits(dice)
    engine = limits.make_engine()
    added, aborted, prompts = {}, set(), []
    scheduler = engine.scheduler
    for _ in range(dice.randint(5, 40)):
        [action] = dice.choices(list(ACTIONS), list(ACTIONS.values()))
        if action == "add":
            request = random_request(dice, len(added), prompts, limits)
            added[request.request_id] = request
            engine.add(request)
        elif action == "siblings":
            prompt, group = [dice.randint(1, 2) for _ in range(dice.randint(1, 20))], f"s{len(added)}"
            for _ in range(dice.randint(2, 4)):
                request = make_request(prompt, request_id=f"r{len(added)}", sibling_group=group, max_tokens=3)
                added[request.request_id] = request
                engine.add(request)
        elif action == "step":
            for _ in range(dice.randint(1, 4)):
                engine.step()
                SEEN["steps waited"] += any(
                    side.table.state.awaited is not None for each in scheduler.requests.waiting for side in each.sides
                )
        else:
            disturb(action, dice, engine, added, aborted, scheduler.reset_prefix_cache)
    engine.run(max_steps=2000)

    stats = scheduler.make_stats()
    SEEN.update(
        schedules=1,
        preemptions=stats.num_preemptions,
        cached=stats.prefix_cache_hits,
        drafts=stats.num_draft_tokens,
        accepted=stats.num_accepted_tokens,
        failed=sum(engine.results[name].finish_reason is FinishReason.ERROR for name in added),
    )
    SEEN["snapshots"] += engine.check_snapshots()
    may_fail = bool(engine.runner.failing or engine.runner.steps_without_memory)
    for name, request in added.items():
        check_result(engine, request, limits, ended_early=name in aborted, may_fail=may_fail)
    assert stats.kv_cache_usage == 0.0 and scheduler._kv_cache.states.num_free == limits.num_state_slots

    engine.runner.failing.clear()
    engine.runner.steps_without_memory.clear()
    for request in added.values():  # again, from the snapshots that are left
        request.request_id += "-again"
        engine.run(request)
        check_result(engine, request, limits, ended_early=False, may_fail=False)
    engine.check_snapshots()
    engine.step()
    assert not engine.runner.rows


@pytest.mark.parametrize(
    "seed",
    [
        *range(0, 240, 48),
        4160,  # a long prompt is preempted while it is planned
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(24, 240, 48)),
    ],
)
def test_every_request_reads_its_own_state(seed):
    for each in range(seed, seed + 24):
        run_random_schedule(each)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1000, 11_000, 500))
def test_every_request_reads_its_own_state_in_ten_thousand_schedules(seed):
    for each in range(seed, seed + 500):
        run_random_schedule(each)
