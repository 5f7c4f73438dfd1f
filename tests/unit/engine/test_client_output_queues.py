"""Who is told what by an engine core with several front ends."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from mvllm.engine.process import client_output_queues
from mvllm.engine.process.client_output_queues import MultiClientOutputQueues
from mvllm.messages.core_protocol import UtilityResult
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


class Desk:
    """A desk for three front ends, a clock, and what has been told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(client_output_queues.time, "monotonic", lambda: self.now)
        self.output_queue: client_output_queues.OutputQueue = SimpleQueue()
        self.reports: list[tuple[int, list[int]]] = []
        self.desk = MultiClientOutputQueues(
            self.output_queue, 3, lambda stats, counts: self.reports.append((stats.num_running, [*counts]))
        )

    def step(self, *outputs: EngineCoreOutput, busy: bool = True) -> dict[int, EngineCoreOutputs]:
        self.desk.publish(EngineCoreOutputs([*outputs], SchedulerStats(num_running=busy)), is_busy=busy)
        told = [self.output_queue.get() for _ in range(self.output_queue.qsize())]
        assert all(item is not None for item in told)
        return dict(item for item in told if item is not None)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def token(request_id: str, end: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [7], end)


def ids(news: EngineCoreOutputs) -> list[str]:
    return [output.request_id for output in news.outputs]


def test_each_client_gets_the_outputs_of_its_own_requests(desk: Desk) -> None:
    desk.desk.acknowledge(1, 1)
    desk.desk.add_request(1, "a")
    desk.desk.acknowledge(2, 5)
    desk.desk.add_request(2, "b")
    told = desk.step(token("a"), token("b"))
    assert {index: (ids(news), news.num_acknowledged, news.is_busy) for index, news in told.items()} == {
        1: (["a"], 1, True),
        2: (["b"], 5, True),
    }
    told = desk.step(token("a", FinishReason.STOP), token("b"))
    assert (told[1].is_busy, told[2].is_busy) == (False, True)
    assert list(desk.step(token("b"))) == [2]
    desk.desk.acknowledge(1, 2)  # an abort that comes too late, say: its sender waits to hear that it has been heard
    assert desk.step()[1].num_acknowledged == 2
    assert desk.step() == {}
    desk.now += 1.5 * client_output_queues.UPDATE_INTERVAL_SECONDS
    assert list(desk.step()) == [2]  # a sign of life, to whom it matters


def test_a_client_cannot_abort_requests_of_another(desk: Desk) -> None:
    desk.desk.add_request(1, "a")
    assert desk.desk.pop_owned(2, ["a", "unknown"]) == []
    assert desk.desk.pop_owned(1, ["a", "a"]) == ["a"]
    assert desk.step(token("a")) == {}  # it was under way: nobody waits for it


def test_requests_of_a_disconnected_client_are_dropped_and_it_gets_no_updates(desk: Desk) -> None:
    desk.desk.add_request(1, "a")
    desk.desk.add_request(1, "b")
    desk.desk.add_request(2, "c")
    assert sorted(desk.desk.drop_client(1)) == ["a", "b"]
    assert [desk.desk.is_disconnected(source) for source in range(3)] == [False, True, False]
    desk.desk.add_result(1, UtilityResult(1, True))
    assert list(desk.step(token("a"), token("c"))) == [2]
    assert desk.reports[-1] == (1, [0, 0, 1])


def test_rejections_and_call_results_go_to_the_client_that_asked(desk: Desk) -> None:
    desk.desk.reject_request(2, token("x", FinishReason.ERROR))
    desk.desk.add_result(0, UtilityResult(4, True))
    told = desk.step(busy=False)
    assert ids(told[2]) == ["x"] and not told[2].is_busy
    assert [result.id for result in told[0].utility_results] == [4]
    assert desk.step(busy=False) == {}


def test_load_is_reported_at_start_at_end_and_periodically_between(desk: Desk) -> None:
    desk.desk.add_request(1, "a")
    for _ in range(5):
        desk.step(token("a"))
    assert desk.reports == [(1, [0, 1, 0])]
    desk.now += 1.5 * client_output_queues.UPDATE_INTERVAL_SECONDS
    desk.step(token("a"))
    desk.step(token("a", FinishReason.STOP), busy=False)
    assert desk.reports[1:] == [(1, [0, 1, 0]), (0, [0, 0, 0])]
