"""The engine core process: EngineCore between an input thread and an output thread.

Started by `child_program` with the arguments `<name> <control socket> <parent pid>`.

    input thread     DEALER → decode ─> input_queue
    main thread                         input_queue ─> EngineCoreProc.run_busy_loop ─> output_queue
    output thread                                                                output_queue ─> encode → PUSH

Without work, all three threads sleep in the kernel. Commands take effect between two steps, and a slow front end never
delays a step. A failure is sent over the control socket (`run_child`), where the parent finds it after the exit.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from mvllm.engine.process.client_output_queues import ClientOutputQueues, LoadReporter, OutputQueue, make_output_queues
from mvllm.engine.process.core_handshake import CoreHandshake, CoreReady, EngineCoreStartArgs
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.errors import EngineDeadError, PlatformError, RequestError
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.child_startup import run_child
from mvllm.executor.process.handshake import send_message
from mvllm.executor.process.process_utils import freeze_garbage_collection, gc_paused
from mvllm.logging import get_logger
from mvllm.messages.commands import decode_command
from mvllm.messages.coordinator_protocol import CoreLoad
from mvllm.messages.core_protocol import (
    AbortRequests,
    AddRequests,
    CallCore,
    CallResult,
    CoreMessage,
    DropClient,
    StopCore,
)
from mvllm.messages.multimodal import ArrayData, restore_sent_features
from mvllm.messages.process_failure import describe_failure
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)

if TYPE_CHECKING:
    from mvllm.engine.core.engine_core import EngineCore

logger = get_logger(__name__)

_FLUSH_TIMEOUT_SECONDS = 1.5  # for the last updates of a core that exits
_STEP = "execution"

InputQueue = SimpleQueue[tuple[int, int, CoreMessage] | Exception]
"""(front end, number of the command there, command); an exception ends the busy loop."""


class EngineCoreProc:
    """The busy loop of the process, between the input queue and the output queues.

    Args:
        name: The process' name.
        core: The engine core, used by this object only.
        input_queue: Numbered commands; or an exception, which ends the loop.
        output_queues: Collect the updates for each front end.
        activity_table: The process' activity is written to its row 0.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        input_queue: InputQueue,
        output_queues: ClientOutputQueues,
        activity_table: ActivityTable,
    ) -> None:
        self._name = name
        self._core = core
        self._input_queue = input_queue
        self._output_queues = output_queues
        self._activity_table = activity_table
        self._decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._num_received = 0

    def run_busy_loop(self) -> None:
        """Runs steps and handles commands until StopCore.

        Raises:
            EngineDeadError: A step has failed as a whole, or the workers can no longer be used.
        """
        while self._process_commands():
            if self._core.has_requests():
                self._activity_table.write(0, _STEP, self._num_received, self._core.next_step)
                outputs = self._core.step()
            else:
                outputs = EngineCoreOutputs(stats=self._core.make_stats())
            outputs.cache_changes = self._core.pop_cache_changes()
            self._output_queues.publish(outputs, is_busy=self._core.has_requests())

    def _process_commands(self) -> bool:
        """Handles all queued commands; waits for one while there is no work, but not while changes of connectors'
        stores are to be published. Returns False for StopCore."""
        input_queue = self._input_queue
        is_waiting = not self._core.has_requests()
        if is_waiting:
            self._activity_table.write(0, IDLE, self._num_received)
        while is_waiting or not input_queue.empty():
            try:
                item = input_queue.get(timeout=self._core.report_seconds)
            except Empty:
                return True
            is_waiting = False
            if isinstance(item, Exception):
                raise EngineDeadError(f"The engine stopped: {type(item).__name__}: {item}") from item
            source, number, command = item
            self._num_received += 1
            self._output_queues.acknowledge(source, number)
            if isinstance(command, StopCore):
                return False
            if not self._output_queues.is_disconnected(source):
                self._handle_command(source, command)
        return True

    def _handle_command(self, source: int, command: CoreMessage) -> None:
        match command:
            case AddRequests():
                features: dict[bytes, dict[str, ArrayData]] = {}
                for request_id, request in zip(command.request_ids, command.requests):
                    self._add_request(source, request_id, request, features)
            case AbortRequests():
                self._core.abort_requests(self._output_queues.pop_owned(source, command.request_ids))
            case CallCore():
                self._output_queues.add_result(source, self._call(command))
            case DropClient():
                self._core.abort_requests(self._output_queues.drop_client(command.index))

    def _add_request(
        self, source: int, request_id: str, encoded: msgspec.Raw, features: dict[bytes, dict[str, ArrayData]]
    ) -> None:
        """Queues a request. One that cannot be decoded or queued ends with an error; others are not affected.

        Args:
            features: Of the items in the command so far, see `restore_sent_features`.
        """
        try:
            request = self._decoder.decode(encoded)
            if request.items:
                restore_sent_features(request.items, features)
            self._core.add_request(request)
            self._output_queues.add_request(source, request_id)
        except Exception as e:  # noqa: BLE001  (sent to the caller)
            logger.warning("The engine core refused a request: %s", e)
            error = f"The engine core cannot take this request: {e}"
            parameter = e.parameter if isinstance(e, RequestError) else None  # with one it is the client's error
            self._output_queues.reject_request(
                source,
                EngineCoreOutput(request_id, [], FinishReason.ERROR, error=error, error_parameter=parameter),
            )

    def _call(self, call: CallCore) -> CallResult:
        self._activity_table.write(0, call.name, self._num_received)
        try:
            value = self._core.call(decode_command(call.command))
            _check_encodable(call.name, value)
            return CallResult(call.id, value)
        except Exception as e:  # noqa: BLE001  (raised in the caller's process)
            return CallResult(call.id, None, describe_failure(e, name=self._name, activity=call.name))


def _check_encodable(name: str, value: Any) -> None:
    """Checks a result before the thread that sends it does, which an error would end.

    Raises:
        PlatformError: It cannot be sent.
    """
    try:
        msgspec.msgpack.encode(value)
    except Exception as e:
        raise PlatformError(
            f"The result of {name} cannot be sent to the front end's process ({e}). Return numbers, texts, bytes, "
            "lists and dicts."
        ) from e


def main() -> None:
    """The program. Never returns."""
    run_child(EngineCoreStartArgs, _serve)


def _serve(start: EngineCoreStartArgs, control: socket.socket, activity_table: ActivityTable) -> int:
    input_queue: InputQueue = SimpleQueue()
    output_queue: OutputQueue = SimpleQueue()
    threading.Thread(target=_receive_commands, args=(start, input_queue), name="core-input", daemon=True).start()
    sender = threading.Thread(target=_send_updates, args=(start, output_queue), name="core-output", daemon=True)
    sender.start()
    core = _build_core(start, activity_table)
    try:
        core.on_failure(input_queue.put)
        output_queues = make_output_queues(len(start.addresses), output_queue, _make_load_reporter(start, core))
        freeze_garbage_collection()
        proc = EngineCoreProc(start.name, core, input_queue, output_queues, activity_table)
        activity_table.write(0, IDLE)  # before the front end reads it
        send_message(control, CoreHandshake(ready=CoreReady(core.cache_summary, core.start_seconds, core.num_workers)))
        proc.run_busy_loop()
        return 0
    finally:
        output_queue.put(None)
        if sys.exception() is None:
            activity_table.write(0, "shutdown")
        core.shutdown()
        sender.join(_FLUSH_TIMEOUT_SECONDS)


def _build_core(start: EngineCoreStartArgs, activity_table: ActivityTable) -> EngineCore:
    from mvllm.executor.config_codec import decode_config
    from mvllm.platform.choose import choose_platform

    activity_table.write(0, f"loading the platform {start.platform}")
    platform = choose_platform(start.platform, isolated=False).platform
    activity_table.write(0, "importing the engine core")
    from mvllm.engine.core.engine_core import EngineCore
    from mvllm.engine.core.worker_environment import worker_environment

    config = decode_config(start.config)
    with worker_environment(config.parallel, platform), gc_paused():
        return EngineCore(config, platform, on_phase=lambda phase: activity_table.write(0, phase))


def _make_load_reporter(start: EngineCoreStartArgs, core: EngineCore) -> LoadReporter | None:
    """The function that sends this core's load to the coordinator; None without a coordinator."""
    if start.coordinator_fd is None:
        return None
    rank = core.config.parallel.data_parallel_rank
    coordinator = MessageSocket(start.coordinator_fd)

    def report(stats: SchedulerStats, unfinished: Sequence[int]) -> None:
        coordinator.send(CoreLoad(rank, stats, list(unfinished)))  # dropped if the buffer is full: a newer one follows

    return report


def _receive_commands(start: EngineCoreStartArgs, input_queue: InputQueue) -> None:
    from mvllm.engine.process.zmq_channel import CoreInputChannel

    try:
        channel = CoreInputChannel(start.addresses)
        while True:
            input_queue.put(channel.receive())
    except Exception as e:  # noqa: BLE001  (ends the busy loop)
        input_queue.put(e)


def _send_updates(start: EngineCoreStartArgs, output_queue: OutputQueue) -> None:
    from mvllm.engine.process.zmq_channel import CoreOutputChannel

    channel = CoreOutputChannel(start.addresses)
    while (item := output_queue.get()) is not None:
        channel.send(*item)
    channel.close()


if __name__ == "__main__":
    main()
