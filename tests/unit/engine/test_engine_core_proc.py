"""The loop of an engine-core process between its two queues, and the sockets behind them; without a process."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from mvllm.engine.process import inproc_client
from mvllm.engine.process.client_output_queues import make_output_queues
from mvllm.engine.process.engine_core_proc import EngineCoreProc
from mvllm.engine.process.mp_client import MPClient
from mvllm.engine.process.zmq_channel import ClientChannel, CoreInputChannel, CoreOutputChannel, new_address
from mvllm.errors import ConfigError, EngineDeadError, RequestError
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.messages.commands import CheckHealth, RemoveLoRA, ResetPrefixCache
from mvllm.messages.core_protocol import AbortRequests, AddRequests, CallCore, DropClient, StopCore
from mvllm.messages.multimodal import ArrayData, ItemSpan, MultiModalItem
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SchedulerStats
from mvllm.messages.sampling_params import SamplingParams


class TwoStepCore:
    """Each request takes two steps and is reported in the second."""

    report_seconds = None

    def __init__(self, input_queue):
        self.requests = {}
        self.items = {}
        self.steps = []
        self.at_step = {}
        self.next_step = 0
        self._inbox = input_queue

    def has_requests(self):
        return bool(self.requests)

    def pop_cache_changes(self):
        return None

    def make_stats(self):
        return SchedulerStats(num_running=len(self.requests))

    def add_request(self, request):
        if not request.prompt_token_ids:
            raise RequestError("The prompt is empty.", parameter="prompt")
        self.requests[request.request_id] = 0
        self.items[request.request_id] = request.items

    def abort_requests(self, ids):
        for request_id in ids:
            self.requests.pop(request_id, None)

    def step(self):
        self.steps.append(sorted(self.requests))
        for command in self.at_step.pop(self.next_step, ()):
            self._inbox.put(command)
        self.next_step += 1
        outputs = EngineCoreOutputs()
        for request_id, done in list(self.requests.items()):
            self.requests[request_id] = done + 1
            if done:
                del self.requests[request_id]
                outputs.outputs.append(EngineCoreOutput(request_id, [1, 2], FinishReason.LENGTH))
        outputs.stats = self.make_stats()
        return outputs

    def reset_prefix_cache(self):
        return not self.requests

    def check_health(self):
        raise RuntimeError("no pulse")

    def call(self, command):
        return {ResetPrefixCache: self.reset_prefix_cache, CheckHealth: self.check_health}[type(command)]()


@pytest.fixture
def loop():
    input_queue, output_queue, activity = SimpleQueue(), SimpleQueue(), ActivityTable.create(1)
    core = TwoStepCore(input_queue)
    core.input_queue, core.output_queue, core.activity = input_queue, output_queue, activity
    core.proc = EngineCoreProc("EngineCore", core, input_queue, make_output_queues(1, output_queue), activity)
    yield core
    activity.close()


def add(*ids, prompt=(1, 2)):
    params = SamplingParams()
    requests = [EngineCoreRequest(request_id=i, prompt_token_ids=list(prompt), sampling_params=params) for i in ids]
    return AddRequests(list(ids), [msgspec.Raw(msgspec.msgpack.encode(request)) for request in requests])


STOP = (0, 99, StopCore())


def serve(loop, commands, *, stop_at_step=None) -> list[EngineCoreOutputs]:
    """Runs the loop until it has handled all commands and, if requested, has begun a step."""
    for number, command in enumerate(commands, 1):
        loop.input_queue.put((0, number, command))
    if stop_at_step is None:
        loop.input_queue.put(STOP)
    else:
        loop.at_step[stop_at_step] = [STOP]
    loop.proc.run_busy_loop()
    return [loop.output_queue.get()[1] for _ in range(loop.output_queue.qsize())]


def test_requests_sent_together_start_together_and_updates_have_content(loop):
    updates = serve(loop, [add("a", "b"), add("c")], stop_at_step=1)
    assert loop.steps == [["a", "b", "c"]] * 2
    last = updates[-1]
    assert [output.request_id for output in last.outputs] == ["a", "b", "c"]
    assert (last.num_acknowledged, last.is_busy) == (2, False)
    assert len(updates) <= 2  # the first step's update is sent only if none was sent for a while


def test_a_request_that_cannot_be_decoded_or_queued_ends_alone(loop):
    broken = AddRequests(["x"], [msgspec.Raw(msgspec.msgpack.encode({"request_id": "x", "prompt_token_ids": ["?"]}))])
    refused = AddRequests(["y"], add("y", prompt=()).requests)
    updates = serve(loop, [broken, add("a"), refused], stop_at_step=1)
    outputs = {output.request_id: output for each in updates for output in each.outputs}
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    for request_id, text in (("x", "cannot take this request"), ("y", "The prompt is empty.")):
        assert outputs[request_id].finish_reason is FinishReason.ERROR and text in outputs[request_id].error
    # The client's error, which is no failure of the engine.
    assert (outputs["x"].error_parameter, outputs["y"].error_parameter) == (None, "prompt")
    assert loop.steps == [["a"]] * 2


def test_the_features_of_an_item_are_sent_once_with_requests_that_have_it(loop):
    client = MPClient(None, SimpleNamespace(channel=None), "")
    one, two = (
        MultiModalItem(
            "image", ItemSpan(bytes([i]) * 32, 0, 1, [(0, 1)]), 1, {"x": ArrayData("u1", [9999], bytes(9999))}
        )
        for i in range(2)
    )
    for name, items in (("a", [one, two, one]), ("b", [two, one])):
        client._buffer_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(), items=items)
        )
    first = client._take_buffered_requests()
    assert sum(len(bytes(each)) for each in first.requests) < 3 * 9999
    client._buffer_request(
        EngineCoreRequest(request_id="c", prompt_token_ids=[1], sampling_params=SamplingParams(), items=[one])
    )
    serve(loop, [first, client._take_buffered_requests()], stop_at_step=1)
    assert loop.items == {"a": [one, two, one], "b": [two, one], "c": [one]}
    assert loop.items["a"][1].features is loop.items["b"][0].features


def test_a_core_without_work_reports_that_it_is_idle(loop):
    loop.at_step[0] = [(0, 2, AbortRequests(["a", "unknown"]))]
    loop.input_queue.put((0, 1, add("a")))
    thread = threading.Thread(target=loop.proc.run_busy_loop)
    thread.start()
    _, update = loop.output_queue.get(timeout=120)
    while update.num_acknowledged < 2:
        _, update = loop.output_queue.get(timeout=120)
    assert not update.is_busy and not update.outputs
    loop.input_queue.put(STOP)
    thread.join(120)
    assert loop.activity.read(0).text == IDLE


def test_commands_of_a_disconnected_client_are_ignored(loop):
    proc = EngineCoreProc("EngineCore", loop, loop.input_queue, make_output_queues(3, loop.output_queue), loop.activity)
    loop.at_step[1] = [STOP]
    for item in ((2, 1, add("a")), (0, 1, DropClient(2)), (2, 2, add("b")), (1, 1, add("c"))):
        loop.input_queue.put(item)
    proc.run_busy_loop()
    assert loop.steps == [["c"]] * 2
    told = [loop.output_queue.get() for _ in range(loop.output_queue.qsize())]
    assert {target for target, _ in told} <= {0, 1}


def test_commands_are_answered_with_results_and_errors(loop):
    encode = msgspec.msgpack.encode
    commands = [encode(ResetPrefixCache()), encode(CheckHealth()), encode(["shutdown"]), encode(RemoveLoRA("x"))]
    for number, command in enumerate(commands, 1):
        loop.input_queue.put((0, number, CallCore(number, "name", msgspec.Raw(command))))
    thread = threading.Thread(target=loop.proc.run_busy_loop)
    thread.start()
    answers = {}
    while len(answers) < 4:
        answers |= {result.id: result for result in loop.output_queue.get(timeout=120)[1].call_results}
    loop.input_queue.put(STOP)
    thread.join(120)
    assert answers[1].value is True and answers[1].failure is None
    error = answers[2].failure.to_exception()
    assert isinstance(error, RuntimeError) and str(error) == "no pulse"
    for number in (3, 4):  # no command, and an argument of a wrong type
        assert isinstance(answers[number].failure.to_exception(), RequestError)


def test_a_failure_of_the_workers_ends_the_loop_with_it_as_the_cause(loop):
    cause = RuntimeError("rank 1 is gone")
    loop.input_queue.put(cause)
    with pytest.raises(EngineDeadError, match="RuntimeError: rank 1 is gone") as caught:
        loop.proc.run_busy_loop()
    assert caught.value.__cause__ is cause


def test_messages_without_the_token_are_dropped_on_both_sides():
    address = new_address()
    front, name = ClientChannel(address), address.identity
    context = zmq.Context()
    strangers = []
    almost = address.token[:-1] + bytes([address.token[-1] ^ 1])
    for kind, to in ((zmq.DEALER, address.commands), (zmq.PUSH, address.updates)):
        stranger = context.socket(kind)
        stranger.connect(to)
        for frames in ([b""], [b"x" * 40], [almost, b"y"], [b"a", b"b", b"c"]):
            stranger.send_multipart(frames)
        strangers.append(stranger)
    assert not front.commands.poll(300) or not front.is_connected()
    source, target = CoreInputChannel([address]), CoreOutputChannel([address])
    while not front.is_connected():
        assert front.commands.poll(120_000)
    front.commands.send_multipart([name, b"not the token" + bytes(8), b"junk"])
    front.commands.send_multipart([name, address.token + bytes(8), b"\xc1 no msgpack"])
    assert front.send(AbortRequests(["a"])) == 1
    assert source.receive() == (0, 1, AbortRequests(["a"]))
    target.send(0, EngineCoreOutputs(num_acknowledged=1))
    updates = None
    while updates is None:
        assert front.update_socket.poll(120_000)
        updates = front.receive()
    assert updates.num_acknowledged == 1
    for stranger in strangers:
        stranger.close(0)
    context.term()
    target.close()
    source.close()
    front.close()


def test_engine_core_process_is_refused_with_an_external_launcher():
    from mvllm.config.engine_config import ParallelConfig

    parallel = ParallelConfig(engine_core_process=True, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match=r"external_launcher.*Leave engine_core_process unset"):
        inproc_client._uses_core_process(parallel)
