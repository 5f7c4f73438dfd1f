"""Writes stacks to the log when requests get no answer although nothing computes.

A server whose engine is busy may answer late, and the engine core's own time limits end a step that hangs. What is left
is a request that no process works on: the event loop is blocked, or an output or a wake-up was lost. It leaves no trace
but a client that waits, so the watchdog writes what every thread and task was doing at that time.

Its thread sleeps without a time limit while there are no requests, and wakes once per `SILENCE_SECONDS` otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mvllm.engine.async_llm import AsyncLLM
from mvllm.logging import get_logger

logger = get_logger(__name__)

SILENCE_SECONDS = 60.0
"""Seconds without an answer after which a request is looked at."""
LOOP_SECONDS = 10.0
"""Seconds for which the event loop may run no callback before it counts as blocked."""
REPORT_SECONDS = 600.0
"""Seconds between two reports."""
_MAX_TASKS = 40
_MAX_TEXT = 100_000  # characters of a report


class WatchedRequest:
    """A request whose answer is not complete.

    Args:
        name: What it is, for the report.
        waits_for_client: Returns whether the answer waits until the client reads.

    Attributes:
        name, waits_for_client: As given.
        since: Monotonic time of its start, or of the last look at it.
    """

    def __init__(self, name: str, waits_for_client: Callable[[], bool]) -> None:
        self.name = name
        self.waits_for_client = waits_for_client
        self.since = time.monotonic()


class StallWatchdog:
    """Watches the requests of one server process. `begin` and `end` are called in the event loop's thread.

    Args:
        loop: The event loop.
        engine: The engine.
        seconds: As SILENCE_SECONDS.
        loop_seconds: As LOOP_SECONDS.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: AsyncLLM,
        *,
        seconds: float = SILENCE_SECONDS,
        loop_seconds: float = LOOP_SECONDS,
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._seconds = seconds
        self._loop_seconds = loop_seconds
        self._requests: dict[WatchedRequest, None] = {}
        self._changed = threading.Condition()
        self._sleeps = False  # until a request begins
        self._is_closed = False
        self._next_report = float("-inf")
        self._thread = threading.Thread(target=self._run, name="stall-watchdog", daemon=True)
        self._thread.start()

    def begin(self, name: str, waits_for_client: Callable[[], bool] = lambda: False) -> WatchedRequest:
        """Watches a request until `end`. Arguments as for WatchedRequest."""
        request = WatchedRequest(name, waits_for_client)
        self._requests[request] = None
        if self._sleeps:
            with self._changed:
                self._changed.notify()
        return request

    def end(self, request: WatchedRequest) -> None:
        """The request has its answer, or its client has left."""
        self._requests.pop(request, None)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    # --- in its thread

    def _run(self) -> None:
        while self._wait():
            now = time.monotonic()
            late = [request for request in list(self._requests) if request.since + self._seconds <= now]
            if late:
                try:
                    self._look_at(late)
                except Exception:
                    logger.exception("Requests without an answer could not be looked at.")
                for request in late:
                    request.since = time.monotonic()

    def _wait(self) -> bool:
        """Waits until a request may be late. False after `close`."""
        with self._changed:
            self._sleeps = True  # before the look at the requests, so that `begin` sees it or is seen
            while not self._requests and not self._is_closed:
                self._changed.wait()
            self._sleeps = False
            oldest = min((request.since for request in list(self._requests)), default=time.monotonic())
            self._changed.wait_for(lambda: self._is_closed, max(0.0, oldest + self._seconds - time.monotonic()))
            return not self._is_closed

    def _look_at(self, late: list[WatchedRequest]) -> None:
        look = self._look_from_loop(late)
        try:
            asked = asyncio.run_coroutine_threadsafe(look, self._loop)
        except RuntimeError:  # the loop has ended
            look.close()
            return
        try:
            stalled, tasks = asked.result(self._loop_seconds)
        except TimeoutError:
            self._report(f"The event loop has run no callback for {self._loop_seconds:g} s.", late, "")
            return
        if stalled:
            reason = f"Requests have had no complete answer for {self._seconds:g} s, and the engine computes nothing."
            self._report(reason, stalled, tasks)

    def _report(self, reason: str, requests: list[WatchedRequest], tasks: str) -> None:
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + REPORT_SECONDS
        names = ", ".join(request.name for request in requests[:10])
        parts = [
            f"{reason} This may be a fault of the server. Requests: {len(requests)} ({names}).",
            "Threads of the API server:",
            "\n".join(_thread_stacks()),
        ]
        if tasks:
            parts += ["Tasks of the API server:", tasks]
        parts += self._engine.describe_cores()
        logger.warning("%s", "\n".join(parts)[:_MAX_TEXT])

    # --- in the event loop's thread

    async def _look_from_loop(self, late: list[WatchedRequest]) -> tuple[list[WatchedRequest], str]:
        """The requests that nobody works on, and the stacks of the tasks if there are any."""
        stalled = [request for request in late if request in self._requests and not request.waits_for_client()]
        if not stalled or not self._engine.is_idle:
            return [], ""
        return stalled, "\n".join(_task_stacks(self._loop))


def _thread_stacks() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            yield f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"


def _task_stacks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in tasks[:_MAX_TASKS]:
        with contextlib.suppress(Exception):  # tasks of other libraries may be anything
            yield "\n".join((f"Task {task.get_name()}:", *map(_describe_frame, _awaits(task))))


def _describe_frame(frame: FrameType) -> str:
    return f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _awaits(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of a suspended task: its coroutine, what that awaits, and so on."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        prefix = next((each for each in ("cr", "gi", "ag") if hasattr(awaited, f"{each}_frame")), None)
        if prefix is None:
            return
        if (frame := getattr(awaited, f"{prefix}_frame")) is not None:
            yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
