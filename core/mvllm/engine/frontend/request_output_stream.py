"""One request as its caller sees it: an async iterator of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from mvllm.engine.frontend.output_processor import RequestState
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.errors import EngineDeadError


class RequestOutputStream:
    """Outputs of one request, as they are asked for: what has come since the last one is one output.

    Used by one task at a time. One that is not read to its end has to be closed (`aclose`, or `async with`), or the
    engine goes on with it.

    Args:
        state: The request.
        show: Makes its next output.
        drop: Ends the request in the engine; called when it is closed before its end.

    Attributes:
        request_id: As it was given.
    """

    __slots__ = ("_abort", "_error", "_has_ended", "_make_output", "_state", "_waiter", "request_id")

    def __init__(
        self,
        state: RequestState,
        show: Callable[[RequestState], RequestOutput | None],
        drop: Callable[[RequestState], None],
    ) -> None:
        self.request_id = state.request_id
        self._state = state
        self._make_output = show
        self._abort = drop
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None
        self._has_ended = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._state.num_prompt_tokens

    def __aiter__(self) -> RequestOutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, once there is one.

        Raises:
            EngineDeadError: The engine has stopped before the request ended; the cause is kept.
        """
        while not self._has_ended:
            if self._state.has_new_output:
                output = self._make_output(self._state)
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
        """Aborts the request if it has not ended, whatever state it is in. Idempotent; in the loop's thread."""
        if not self._has_ended:
            self._has_ended = True
            self._abort(self._state)
            self.notify()

    async def aclose(self) -> None:
        """As `close`, under the name that async generators have for it."""
        self.close()

    # --- the engine's side

    def notify(self) -> None:
        """There is something to take."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: EngineDeadError) -> None:
        """The engine has died: what has come is still handed out, then this is raised."""
        self._error = error
        self.notify()
