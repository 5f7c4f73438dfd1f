"""Per-client output queues of an engine core with several clients."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from mvllm.engine.process import client_output_queues
from mvllm.engine.process.client_output_queues import ClientOutputQueues
from mvllm.messages.core_protocol import CallResult
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


class Core:
    """The output queues of three clients, with a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(client_output_queues.time, "monotonic", lambda: self.now)
        self.output_queue: client_output_queues.OutputQueue = SimpleQueue()
        self.reports: list[tuple[int, list[int]]] = []
        self.queues = ClientOutputQueues(
            self.output_queue, 3, lambda stats, counts: self.reports.append((stats.num_running, [*counts]))
        )

    def step(self, *outputs: EngineCoreOutput, busy: bool = True) -> dict[int, EngineCoreOutputs]:
        self.queues.publish(EngineCoreOutputs([*outputs], SchedulerStats(num_running=busy)), is_busy=busy)
        sent = [self.output_queue.get() for _ in range(self.output_queue.qsize())]
        assert all(item is not None for item in sent)
        return dict(item for item in sent if item is not None)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def token(request_id: str, end: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, [7], end)


def ids(update: EngineCoreOutputs) -> list[str]:
    return [output.request_id for output in update.outputs]


def test_each_client_gets_the_outputs_of_its_own_requests(core: Core) -> None:
    core.queues.acknowledge(1, 1)
    core.queues.add_request(1, "a")
    core.queues.acknowledge(2, 5)
    core.queues.add_request(2, "b")
    sent = core.step(token("a"), token("b"))
    assert {i: (ids(update), update.num_acknowledged, update.is_busy) for i, update in sent.items()} == {
        1: (["a"], 1, True),
        2: (["b"], 5, True),
    }
    sent = core.step(token("a", FinishReason.STOP), token("b"))
    assert (sent[1].is_busy, sent[2].is_busy) == (False, True)
    assert list(core.step(token("b"))) == [2]
    core.queues.acknowledge(1, 2)  # for example an abort after the end; the client waits for the acknowledgement
    assert core.step()[1].num_acknowledged == 2
    assert core.step() == {}
    core.now += 1.5 * client_output_queues.UPDATE_INTERVAL_SECONDS
    assert list(core.step()) == [2]  # only the client with unfinished requests


def test_a_client_cannot_abort_requests_of_another(core: Core) -> None:
    core.queues.add_request(1, "a")
    assert core.queues.pop_owned(2, ["a", "unknown"]) == []
    assert core.queues.pop_owned(1, ["a", "a"]) == ["a"]
    assert core.step(token("a")) == {}  # sampled in a step that ran during the abort


def test_requests_of_a_disconnected_client_are_dropped_and_it_gets_no_updates(core: Core) -> None:
    core.queues.add_request(1, "a")
    core.queues.add_request(1, "b")
    core.queues.add_request(2, "c")
    assert sorted(core.queues.drop_client(1)) == ["a", "b"]
    assert [core.queues.is_disconnected(source) for source in range(3)] == [False, True, False]
    core.queues.add_result(1, CallResult(1, True))
    assert list(core.step(token("a"), token("c"))) == [2]
    assert core.reports[-1] == (1, [0, 0, 1])


def test_rejections_and_call_results_go_to_the_client_that_asked(core: Core) -> None:
    core.queues.reject_request(2, token("x", FinishReason.ERROR))
    core.queues.add_result(0, CallResult(4, True))
    sent = core.step(busy=False)
    assert ids(sent[2]) == ["x"] and not sent[2].is_busy
    assert [result.id for result in sent[0].call_results] == [4]
    assert core.step(busy=False) == {}


def test_load_is_reported_at_start_at_end_and_periodically_between(core: Core) -> None:
    core.queues.add_request(1, "a")
    for _ in range(5):
        core.step(token("a"))
    assert core.reports == [(1, [0, 1, 0])]
    core.now += 1.5 * client_output_queues.UPDATE_INTERVAL_SECONDS
    core.step(token("a"))
    core.step(token("a", FinishReason.STOP), busy=False)
    assert core.reports[1:] == [(1, [0, 1, 0]), (0, [0, 0, 0])]
