"""Who is told what by an engine core with several front ends."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from mvllm.engine.process import client_output_queues
from mvllm.engine.process.client_output_queues import SeveralFrontEnds
from mvllm.messages.core_protocol import CallResult, CoreNews
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


class Desk:
    """A desk for three front ends, a clock, and what has been told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(client_output_queues.time, "monotonic", lambda: self.now)
        self.outbox: client_output_queues.Outbox = SimpleQueue()
        self.reports: list[tuple[int, list[int]]] = []
        self.desk = SeveralFrontEnds(
            self.outbox, 3, lambda stats, counts: self.reports.append((stats.num_running, [*counts]))
        )

    def step(self, *outputs: EngineCoreOutput, busy: bool = True) -> dict[int, CoreNews]:
        self.desk.tell(EngineCoreOutputs([*outputs], SchedulerStats(num_running=busy)), is_busy=busy)
        told = [self.outbox.get() for _ in range(self.outbox.qsize())]
        assert all(item is not None for item in told)
        return dict(item for item in told if item is not None)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def token(request_id: str, end: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [7], end)


def ids(news: CoreNews) -> list[str]:
    return [output.request_id for output in news.outputs.outputs]


def test_each_hears_of_its_own_requests_and_of_their_end(desk: Desk) -> None:
    desk.desk.note_taken(1, 1)
    desk.desk.begin(1, "a")
    desk.desk.note_taken(2, 5)
    desk.desk.begin(2, "b")
    told = desk.step(token("a"), token("b"))
    assert {index: (ids(news), news.taken, news.is_busy) for index, news in told.items()} == {
        1: (["a"], 1, True),
        2: (["b"], 5, True),
    }
    told = desk.step(token("a", FinishReason.STOP), token("b"))
    assert (told[1].is_busy, told[2].is_busy) == (False, True)
    assert list(desk.step(token("b"))) == [2]
    desk.desk.note_taken(1, 2)  # an abort that comes too late, say: its sender waits to hear that it has been heard
    assert desk.step()[1].taken == 2
    assert desk.step() == {}
    desk.now += 1.5 * client_output_queues.NEWS_SECONDS
    assert list(desk.step()) == [2]  # a sign of life, to whom it matters


def test_nobody_can_end_what_is_anothers(desk: Desk) -> None:
    desk.desk.begin(1, "a")
    assert desk.desk.own(2, ["a", "unknown"]) == []
    assert desk.desk.own(1, ["a", "a"]) == ["a"]
    assert desk.step(token("a")) == {}  # it was under way: nobody waits for it


def test_what_a_dead_front_end_leaves_is_dropped_and_it_is_told_nothing(desk: Desk) -> None:
    desk.desk.begin(1, "a")
    desk.desk.begin(1, "b")
    desk.desk.begin(2, "c")
    assert sorted(desk.desk.drop(1)) == ["a", "b"]
    assert [desk.desk.is_gone(source) for source in range(3)] == [False, True, False]
    desk.desk.answer(1, CallResult(1, True))
    assert list(desk.step(token("a"), token("c"))) == [2]
    assert desk.reports[-1] == (1, [0, 0, 1])


def test_refusals_and_answers_go_to_who_asked(desk: Desk) -> None:
    desk.desk.refuse(2, token("x", FinishReason.ERROR))
    desk.desk.answer(0, CallResult(4, True))
    told = desk.step(busy=False)
    assert ids(told[2]) == ["x"] and not told[2].is_busy
    assert [result.id for result in told[0].results] == [4]
    assert desk.step(busy=False) == {}


def test_the_coordinator_hears_of_a_beginning_of_an_end_and_now_and_then_between(desk: Desk) -> None:
    desk.desk.begin(1, "a")
    for _ in range(5):
        desk.step(token("a"))
    assert desk.reports == [(1, [0, 1, 0])]
    desk.now += 1.5 * client_output_queues.NEWS_SECONDS
    desk.step(token("a"))
    desk.step(token("a", FinishReason.STOP), busy=False)
    assert desk.reports[1:] == [(1, [0, 1, 0]), (0, [0, 0, 0])]
