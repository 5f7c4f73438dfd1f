"""Admission policies: questions change nothing, and only those that may pass over a request are asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.scheduler import Scheduler
from mvllm.scheduler.waiting_plan import WaitingPlan
from tests.unit.scheduler import builders, test_items, test_random_kv_tiers, test_random_state_traffic
from tests.unit.scheduler.builders import make_encoders, make_request, make_scheduler


def policies_of(scheduler: Scheduler) -> list[str]:
    return [type(policy).__name__ for policy in scheduler._planner._waiting_plan._policies]


def test_an_engine_has_the_policies_that_it_needs_in_the_order_of_their_costs() -> None:
    always = {"enable_chunked_prefill": True}
    assert policies_of(make_scheduler(**always)) == ["LongPromptTurns", "AwaitedMasks", "PairRows", "LongPromptShares"]
    assert policies_of(make_scheduler(enable_chunked_prefill=False)) == ["AwaitedMasks", "PairRows", "WholePrompts"]
    everything = make_scheduler(max_loras=1, num_state_slots=3, encoders=make_encoders())
    assert policies_of(everything) == [
        *("LoRASlots", "LongPromptTurns", "AwaitedSnapshots", "AwaitedMasks", "PairRows"),  # need no look at the cache
        *("SharedPrefixes", "LongPromptShares", "Encoders"),
    ]


def test_policies_that_would_admit_everything_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    decide = WaitingPlan._decide

    def record(self: WaitingPlan, candidate: Candidate, policies: list[AdmissionPolicy]) -> Decision:
        asked.extend(type(policy).__name__ for policy in policies)
        return decide(self, candidate, policies)

    monkeypatch.setattr(WaitingPlan, "_decide", record)
    scheduler = make_scheduler()
    scheduler.add_request(make_request())
    scheduler.schedule()
    assert asked == ["LongPromptTurns", "LongPromptShares"]
    asked.clear()
    scheduler.add_request(make_request(companion=[1, 2]))
    scheduler.schedule()
    assert asked == ["LongPromptTurns", "PairRows", "LongPromptShares"]


@pytest.mark.parametrize(
    "run",
    [
        test_random_state_traffic.run_random_schedule,
        test_random_kv_tiers.run_random_schedule,
        test_items.test_random_items_budgets_and_caches,
    ],
    ids=["states", "tiers", "items"],
)
def test_a_question_asked_three_times_changes_no_plan(
    run: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plans(num_questions: int) -> list[bytes]:
        found: list[bytes] = []
        with monkeypatch.context() as patch:
            patch.setattr(builders, "_names", itertools.count())
            patch.setattr("os.urandom", lambda count: bytes(count))
            schedule, decide = Scheduler.schedule, WaitingPlan._decide

            def record(self: Scheduler) -> object:
                plan = schedule(self)
                found.append(msgspec.msgpack.encode(plan))
                return plan

            def ask(self: WaitingPlan, candidate: Candidate, policies: list[AdmissionPolicy]) -> Decision:
                for policy, _ in itertools.product(policies, range(num_questions - 1)):
                    policy.decide(Candidate(candidate.request, candidate.step, self._kv_cache))
                return decide(self, candidate, policies)

            patch.setattr(Scheduler, "schedule", record)
            patch.setattr(WaitingPlan, "_decide", ask)
            for seed in range(6):
                run(seed)
        return found

    assert plans(3) == plans(1)
