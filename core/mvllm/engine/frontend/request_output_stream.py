"""The async iterator over one request's outputs, which `AsyncLLM.add_request` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.request_state import RequestState
from mvllm.errors import EngineDeadError


class RequestOutputStream:
    """The outputs of one request. Everything that arrived since the last output is in the next one.

    There is no queue: the outputs accumulate in the RequestState until the caller asks for the next one. A stream is
    used by one task at a time. One that is not read to its end must be closed (`aclose`, or `async with`), or the
    engine continues to compute the request.

    Args:
        state: The request.
        abort: Called when the stream is closed before the request has ended.
        finish_undecodable: Called when `state` has sequences whose tokens cannot be turned into text.

    Attributes:
        request_id: The caller's id.
    """

    __slots__ = ("_abort", "_error", "_finish_undecodable", "_has_ended", "_state", "_waiter", "request_id")

    def __init__(
        self,
        state: RequestState,
        abort: Callable[[RequestState], None],
        finish_undecodable: Callable[[RequestState], None],
    ) -> None:
        self.request_id = state.request_id
        self._state = state
        self._abort = abort
        self._finish_undecodable = finish_undecodable
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None
        self._has_ended = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._state.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return self._state.num_generated_tokens

    def __aiter__(self) -> RequestOutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, once there is one.

        Raises:
            EngineDeadError: The engine stopped before the request ended; the cause is kept.
        """
        state = self._state
        while not self._has_ended:
            if state.has_new_output:
                output = state.make_request_output()
                if state.undecodable_core_ids:
                    self._finish_undecodable(state)
                if output is not None:
                    self._has_ended = output.finished
                    return output
            elif self._error is not None:
                self._has_ended = True
                raise EngineDeadError(str(self._error)) from self._error
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        raise StopAsyncIteration

    async def __aenter__(self) -> RequestOutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request if it has not ended. Idempotent; called in the event loop's thread."""
        if not self._has_ended:
            self._has_ended = True
            self._abort(self._state)
            self.notify()

    async def aclose(self) -> None:
        """Same as `close`; the name that async generators use."""
        self.close()

    # --- called by the engine

    def notify(self) -> None:
        """Wakes the task that waits for the next output."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: EngineDeadError) -> None:
        """Raises `error` in the caller, after the outputs that have arrived."""
        self._error = error
        self.notify()
