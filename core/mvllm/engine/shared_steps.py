"""Threads that share the steps of one LLMEngine: their requests run in the same batches.

One of the threads drives: it runs steps and gives each caller its outputs. The others sleep. A thread that has outputs
of its own returns them to its caller, and another one drives on:

    thread A   add ─ step ─ step ─ step ─ done          drives until its requests are finished
    thread B       add ─────── asleep ────── step ─ done
                       ^ takes effect between two steps, as every other method of the engine

So one thread alone runs its steps itself and wakes nobody. The lock hands the engine over in the order in which threads
asked for it (FairLock): whatever they ask for while a step runs is done before the next step. A step that waits for
another process ends then, because that may not have outputs for long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from mvllm.engine.fair_lock import FairLock
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.errors import MvllmError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_IDLE_SECONDS = 1.0
"""Between two looks at an engine that has unfinished requests and no work."""


class StepCaller:
    """One call that waits for the outputs of its requests.

    Args:
        request_ids: Of its requests.

    Attributes:
        unfinished: The ids of those that have not finished.
        thread: The thread that made it.
    """

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.unfinished = set(request_ids)
        self.thread = threading.get_ident()
        self.outputs: list[RequestOutput] = []
        self.error: MvllmError | None = None
        self._signals: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Ends its wait, or the next one. Callable in any thread or a signal handler."""
        self._signals.put(None)

    def wait(self, timeout: float | None) -> None:
        """Sleeps until `wake`, for that many seconds at most."""
        with contextlib.suppress(Empty):
            self._signals.get(timeout=timeout)


class SharedSteps:
    """The callers of one engine, and which of them drives.

    Args:
        step: Runs one step, whose outputs it passes to `deliver`.
        has_work: Whether `step` would do something. Raises if the engine is closed or dead.
        interrupt_step: Makes a `step` that waits return early. Called in any thread.

    Attributes:
        lock: Guards the engine and this object.
    """

    def __init__(
        self,
        step: Callable[[], None],
        has_work: Callable[[], bool],
        interrupt_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = FairLock(interrupt_step)
        self._step = step
        self._has_work = has_work
        self._callers: dict[str, StepCaller] = {}  # by request id
        self._driver: StepCaller | None = None
        self._asleep: dict[StepCaller, None] = {}  # in order

    @property
    def is_driven(self) -> bool:
        """Whether another thread has a call with unfinished requests, so that steps run as long as there is work. That
        thread may be between two steps, with outputs of the last one."""
        me = threading.get_ident()
        with self.lock:
            return any(caller.thread != me for caller in self._callers.values())

    def add(self, request_ids: Sequence[str]) -> StepCaller:
        """Registers a call, whose requests have just been queued. Called with the lock."""
        caller = StepCaller(request_ids)
        self._callers.update(dict.fromkeys(request_ids, caller))
        return caller

    def remove(self, caller: StepCaller) -> None:
        """Ends a call: its further outputs go to nobody. Called with the lock."""
        for request_id in caller.unfinished:
            self._callers.pop(request_id, None)
        self._asleep.pop(caller, None)
        if self._driver is caller:
            self._driver = None

    def deliver(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Gives callers the outputs of their requests. Returns those of other requests. Called with the lock."""
        if not self._callers:
            return list(outputs)
        others: list[RequestOutput] = []
        for output in outputs:
            caller = self._callers.get(output.request_id)
            if caller is None:
                others.append(output)
                continue
            caller.outputs.append(output)
            if output.finished:
                caller.unfinished.discard(output.request_id)
                del self._callers[output.request_id]
            self._wake(caller)
        return others

    def fail(self, request_ids: Iterable[str], error: MvllmError) -> None:
        """Ends the calls of requests that were dropped without an output. Called with the lock."""
        for request_id in request_ids:
            if (caller := self._callers.pop(request_id, None)) is not None and caller.error is None:
                caller.error = error
                self._wake(caller)

    def resume(self) -> None:
        """Lets a sleeping thread drive if none does. Called with the lock, after anything that may be work."""
        if self._driver is None and self._asleep:
            self._wake(next(iter(self._asleep)))

    def next_outputs(self, caller: StepCaller, before_step: Callable[[], None]) -> list[RequestOutput]:
        """Runs steps, or sleeps while another thread does, until there are outputs of the caller's requests.

        Args:
            before_step: Called before each step, without the lock. An exception that it raises ends the call.

        Returns:
            New outputs in their order; empty if all its requests have finished.

        Raises:
            EngineDeadError: The engine failed or was closed.
            MvllmError: Its requests were dropped, see `fail`.
        """
        while True:
            before_step()
            with self.lock:
                if caller.error is not None:
                    raise caller.error
                if caller.outputs or not caller.unfinished:
                    outputs, caller.outputs = caller.outputs, []
                    if self._driver is caller:
                        self._driver = None
                        self.resume()
                    return outputs
                if self._driver is None or self._driver is caller:
                    self._driver = None
                    if self._has_work():
                        self._driver = caller
                        self._step()
                        continue
                self._asleep[caller] = None
                # A paused engine has no work and no driver, who would notice its death.
                timeout = _IDLE_SECONDS if self._driver is None else None
            caller.wait(timeout)

    def _wake(self, caller: StepCaller) -> None:
        if caller in self._asleep:
            del self._asleep[caller]
            caller.wake()


def exclusive(method: _Method) -> _Method:
    """Runs a method of an engine between two steps: no other thread uses the engine meanwhile."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps: SharedSteps = self._shared_steps
        with steps.lock:
            try:
                return method(self, *args, **kwargs)
            finally:
                steps.resume()

    return cast(_Method, guarded)
