"""An engine core in a process of its own: `python -m mvllm.engine.process.engine_core_proc <name> <control socket> <parent pid>`.

    input thread     DEALER → decode ─> inbox
    main thread                         inbox ─> EngineCoreProc.run_busy_loop ─> outbox
    output thread                                                                outbox ─> encode → PUSH

Without work, all three sleep in the kernel. The front end's commands take effect between two steps, and a front end
that is slow to listen never holds up a step. A failure of the engine goes over the control socket, whose bytes outlive
the process: no matter how the two sides are scheduled, the front end finds it beside the process' death.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from mvllm.engine.process.remote_exceptions import describe_core_failure
from mvllm.engine.process.core_handshake import CoreHandshake, CoreReady, CoreStart
from mvllm.engine.process.message_socket import DatagramDoor
from mvllm.engine.process.client_output_queues import LoadReport, NewsDesk, Outbox, make_desk
from mvllm.errors import ConfigError, EngineDeadError
from mvllm.executor.process.child_startup import begin
from mvllm.executor.process.handshake import send_message
from mvllm.executor.process.process_utils import collector_paused, leave
from mvllm.executor.process.activity_table import IDLE, StatusBoard
from mvllm.logging import get_logger
from mvllm.messages.coordinator_protocol import CoreLoad
from mvllm.messages.core_protocol import (
    AbortRequests,
    AddRequests,
    CallCore,
    CallResult,
    Command,
    DropFrontEnd,
    StopCore,
)
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

_DELIVERY_SECONDS = 1.5  # for the last news of a core that ends
_STEP = "execution"

Inbox = SimpleQueue[tuple[int, int, Command] | Exception]
"""Commands with the front end that each comes from, and its number there."""


class EngineCoreProc:
    """The loop between the two queues.

    Args:
        name: The process' name.
        core: Does the work. This object is its only user.
        inbox: Numbered commands; or an exception, which ends the loop.
        desk: Keeps what front ends are to be told.
        board: Where it says what it is doing.
    """

    def __init__(self, name: str, core: EngineCore, inbox: Inbox, desk: NewsDesk, board: StatusBoard) -> None:
        self._name = name
        self._core = core
        self._inbox = inbox
        self._desk = desk
        self._board = board
        self._decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._calls: Mapping[str, Callable[..., bool | None]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "check_health": core.check_health,
            "sleep": core.sleep,
            "wake_up": core.wake_up,
            "add_lora": core.add_lora,
            "remove_lora": core.remove_lora,
        }
        self._num_taken = 0

    def run_busy_loop(self) -> None:
        """Serves until told to stop.

        Raises:
            EngineDeadError: A step has failed as a whole, or the workers can no longer be used.
        """
        while self._take_commands():
            if self._core.has_requests():
                self._board.write(0, _STEP, self._num_taken, self._core.next_step)
                outputs = self._core.step()
            else:
                outputs = EngineCoreOutputs(stats=self._core.make_stats())
            self._desk.tell(outputs, is_busy=self._core.has_requests())

    def _take_commands(self) -> bool:
        """Takes all commands there are, and waits for one while there is no work; False when one says stop."""
        inbox = self._inbox
        is_waiting = not self._core.has_requests()
        if is_waiting:
            self._board.write(0, IDLE, self._num_taken)
        while is_waiting or not inbox.empty():
            item = inbox.get()
            is_waiting = False
            if isinstance(item, Exception):
                raise EngineDeadError(f"The engine stopped: {type(item).__name__}: {item}") from item
            source, number, command = item
            self._num_taken += 1
            self._desk.note_taken(source, number)
            if isinstance(command, StopCore):
                return False
            if not self._desk.is_gone(source):
                self._take(source, command)
        return True

    def _take(self, source: int, command: Command) -> None:
        match command:
            case AddRequests():
                for request_id, request in zip(command.request_ids, command.requests):
                    self._add(source, request_id, request)
            case AbortRequests():
                self._core.abort_requests(self._desk.own(source, command.request_ids))
            case CallCore():
                self._desk.answer(source, self._call(command))
            case DropFrontEnd():
                self._core.abort_requests(self._desk.drop(command.index))

    def _add(self, source: int, request_id: str, encoded: msgspec.Raw) -> None:
        """Queues a request. One that cannot be read or taken ends with an error, and nothing else does."""
        try:
            self._core.add_request(self._decoder.decode(encoded))
            self._desk.begin(source, request_id)
        except Exception as e:  # noqa: BLE001  (goes to whoever asked)
            logger.warning("The engine core cannot take a request: %s", e)
            error = f"The engine core cannot take this request: {e}"
            self._desk.refuse(source, EngineCoreOutput(request_id, [], FinishReason.ERROR, error=error))

    def _call(self, command: CallCore) -> CallResult:
        self._board.write(0, command.method, self._num_taken)
        try:
            call = self._calls.get(command.method)
            if call is None:
                raise ConfigError(f"An engine core offers {', '.join(sorted(self._calls))}; not {command.method!r}.")
            return CallResult(command.id, call() if command.argument is None else call(command.argument))
        except Exception as e:  # noqa: BLE001  (raised where it was called)
            return CallResult(command.id, None, describe_core_failure(e, name=self._name, activity=command.method))


def main() -> None:
    """The program. Never returns."""
    start, control, board = begin(CoreStart)
    try:
        _serve(start, control, board)
    except BaseException as e:  # noqa: BLE001  (travels to the front end)
        failure = describe_core_failure(e, name=start.name, activity=str(board.read(0)))
        send_message(control, CoreHandshake(failure=failure))
        leave(1)
    leave(0)


def _serve(start: CoreStart, control: socket.socket, board: StatusBoard) -> None:
    inbox: Inbox = SimpleQueue()
    outbox: Outbox = SimpleQueue()
    threading.Thread(target=_receive, args=(start, inbox), name="core-input", daemon=True).start()
    sender = threading.Thread(target=_send, args=(start, outbox), name="core-output", daemon=True)
    sender.start()
    core = _build(start, board)
    try:
        core.on_failure(inbox.put)
        desk = make_desk(len(start.addresses), outbox, _load_report(start, core))
        proc = EngineCoreProc(start.name, core, inbox, desk, board)
        board.write(0, IDLE)  # before the front end may look
        send_message(control, CoreHandshake(CoreReady(core.cache_summary, core.start_seconds)))
        proc.run_busy_loop()
    finally:
        outbox.put(None)
        if sys.exception() is None:
            board.write(0, "shutdown")
        core.shutdown()
        sender.join(_DELIVERY_SECONDS)


def _build(start: CoreStart, board: StatusBoard) -> EngineCore:
    from mvllm.executor.config_codec import decode_config
    from mvllm.platform.choose import choose_platform

    board.write(0, f"loading the platform {start.platform}")
    platform = choose_platform(start.platform).platform
    board.write(0, "importing the engine core")
    from mvllm.engine.core.engine_core import EngineCore
    from mvllm.engine.core.worker_environment import worker_environment

    config = decode_config(start.config)
    with worker_environment(config.parallel, platform), collector_paused():
        return EngineCore(config, platform, on_phase=lambda phase: board.write(0, phase))


def _load_report(start: CoreStart, core: EngineCore) -> LoadReport | None:
    """What tells the coordinator, where there is one, how much this core has to do."""
    if start.coordinator_fd is None:
        return None
    rank = core.config.parallel.data_parallel_rank
    door = DatagramDoor(start.coordinator_fd)

    def report(stats: SchedulerStats, unfinished: Sequence[int]) -> None:
        door.send(CoreLoad(rank, stats, list(unfinished)))  # one that does not fit is out of date before there is room

    return report


def _receive(start: CoreStart, inbox: Inbox) -> None:
    from mvllm.engine.process.zmq_channel import CoreInput

    try:
        channel = CoreInput(start.addresses)
        while True:
            inbox.put(channel.receive())
    except Exception as e:  # noqa: BLE001  (ends the loop)
        inbox.put(e)


def _send(start: CoreStart, outbox: Outbox) -> None:
    from mvllm.engine.process.zmq_channel import CoreOutput

    channel = CoreOutput(start.addresses)
    while (item := outbox.get()) is not None:
        channel.send(*item)
    channel.close()


if __name__ == "__main__":
    main()
