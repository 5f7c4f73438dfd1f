"""Where masks are computed, and the limit on their CPU time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from mvllm.structured_output import mask_worker
from mvllm.structured_output.mask_worker import INLINE_SECONDS, MaskTimeBudget, MaskWorker
from tests.unit.structured_output.test_grammar_compiler import (  # noqa: F401  (fixtures)
    StructuredOutputManager,
    Vocabulary,
    outcomes,
    request,
    shared_manager,
    tokens_of,
    vocabulary,
)

CHEAP, EXPENSIVE = 0.0, 1.0
PATIENCE = 60.0


class Job:
    """Computes when `may_go` is set, and records that in `log`."""

    def __init__(self, name: str, expected_seconds: float, log: list[str], may_go: threading.Event) -> None:
        self.name, self.expected_seconds, self.error = name, expected_seconds, None
        self.log, self.may_go, self.begun, self.done = log, may_go, threading.Event(), threading.Event()

    def compute_mask(self) -> None:
        self.begun.set()
        assert self.may_go.wait(PATIENCE)
        self.log.append(self.name)
        self.done.set()


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    worker = MaskWorker(threading.Event())
    worker.begin_step()
    yield worker
    worker.close()


def test_expensive_masks_do_not_block_the_caller_and_cheaper_ones_come_first(worker: MaskWorker) -> None:
    log: list[str] = []
    may_go, now = threading.Event(), threading.Event()
    now.set()
    first = Job("first", EXPENSIVE, log, may_go)
    later = [Job(f"{seconds}", seconds, log, may_go) for seconds in (3.0, 2.0)]
    worker.run(first)
    assert first.begun.wait(PATIENCE)
    for job in later:
        worker.run(job)
    worker.run(Job("cheap", CHEAP, log, now))
    assert log == ["cheap"]  # the others are still blocked
    may_go.set()
    assert all(job.done.wait(PATIENCE) for job in later)
    assert log == ["cheap", "first", "2.0", "3.0"]


def test_masks_that_a_step_waits_for_are_computed_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_worker, "_num_cores", lambda: 6)
    worker = MaskWorker(threading.Event())
    together = threading.Barrier(3)

    class Meets:
        expected_seconds, error = EXPENSIVE, None

        def compute_mask(self) -> None:
            together.wait(PATIENCE)

    class Fails(Meets):
        def compute_mask(self) -> None:
            self.error = "cannot go on"

    jobs = [Meets(), Meets(), Meets(), Fails()]
    for job in jobs:
        worker.defer(job)
    worker.run_deferred()
    assert worker.pop_failed() == [jobs[3]]
    worker.close()


def test_the_inline_time_of_one_step_is_limited(worker: MaskWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    now, blocked = threading.Event(), threading.Event()
    now.set()
    log: list[str] = []
    clock = iter([0.0, 2 * INLINE_SECONDS])
    monkeypatch.setattr(mask_worker.time, "perf_counter", lambda: next(clock))
    worker.run(Job("takes all the time", CHEAP, log, now))
    monkeypatch.undo()
    left_over = Job("left over", CHEAP, log, blocked)
    worker.run(left_over)
    assert log == ["takes all the time"]
    worker.begin_step()
    worker.run(Job("next step", CHEAP, log, now))
    assert log == ["takes all the time", "next step"]
    blocked.set()
    assert left_over.done.wait(PATIENCE)


def test_no_masks_are_computed_for_a_finished_sequence(worker: MaskWorker) -> None:
    log: list[str] = []
    may_go = threading.Event()
    running, dropped, last = (Job(name, EXPENSIVE, log, may_go) for name in ("running", "dropped", "last"))
    for job in (running, dropped, last):
        worker.run(job)
    del dropped, job
    gc.collect()
    may_go.set()
    assert last.done.wait(PATIENCE)
    assert "dropped" not in log


def test_the_time_budget_grows_with_the_tokens() -> None:
    budget = MaskTimeBudget()
    for _ in range(10_000):
        budget.add_token(mask_worker.SECONDS_PER_TOKEN)
    assert not budget.is_exceeded
    budget.add_token(1.1 * mask_worker.FREE_SECONDS)
    assert budget.is_exceeded


def test_sequences_of_an_ambiguous_grammar_end_in_an_error_together(
    shared_manager: StructuredOutputManager,  # noqa: F811
    vocabulary: Vocabulary,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_worker, "FREE_SECONDS", 0.05)
    monkeypatch.setattr(mask_worker, "SECONDS_PER_TOKEN", 0.0)
    [a] = tokens_of(vocabulary, "a")
    found = []
    for name in ("one", "other"):
        asked = request(name, grammar='start: s\ns: s s | "a" |')
        asked.sibling_group = "group"
        shared_manager.submit(asked)
        found.append(outcomes(shared_manager, 1)[name].grammar)
    one, other = found
    assert one is not None and other is not None
    for _ in range(1000):
        one.accept(a)
        if one.error is not None:
            break
    assert "processor time" in str(one.error)
    other.accept(a)
    assert "processor time" in str(other.error)  # the CPU time of a request's n sequences is summed
