"""The async iterator over one request's outputs, which `AsyncLLM.add_request` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.request_state import RequestState
from mvllm.errors import EngineDeadError
from mvllm.multimodal.media_fetcher import current_client
from mvllm.structured_output.output_validator import OutputValidator

Consume = Callable[[RequestOutput], bool]


class RequestOutputStream:
    """The outputs of one request. Everything that arrived since the last output is in the next one.

    There is no queue: the outputs accumulate in the RequestState until the caller asks for the next one. A stream is
    used by one task at a time. One that is not read to its end must be closed (`aclose`, or `async with`), or the
    engine continues to compute the request.

    Args:
        state: The request.
        abort: Called when the stream is closed before the request has ended.
        finish_undecodable: Called when `state` has sequences whose tokens cannot be turned into text.
        validator: Validates ended sequences whose JSON schema is not enforced whole.

    Attributes:
        request_id: The caller's id.
    """

    __slots__ = (
        "_abort",
        "_consume",
        "_error",
        "_finish_undecodable",
        "_has_ended",
        "_is_scheduled",
        "_passed",
        "_state",
        "_validator",
        "_waiter",
        "request_id",
    )

    def __init__(
        self,
        state: RequestState,
        abort: Callable[[RequestState], None],
        finish_undecodable: Callable[[RequestState], None],
        validator: OutputValidator,
    ) -> None:
        self.request_id = state.request_id
        self._state = state
        self._abort = abort
        self._finish_undecodable = finish_undecodable
        self._validator = validator
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineDeadError | None = None
        self._has_ended = False
        self._consume: Consume | None = None
        self._is_scheduled = False  # `_offer` will run
        self._passed: RequestOutput | Exception | None = None  # from `_offer` to the task

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._state.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return self._state.num_generated_tokens

    def set_consumer(self, consume: Consume | None) -> None:
        """Sets a function that is offered outputs while the task waits for them, so that the task need not run.

        Args:
            consume: Returns whether it has used up the output; one that it has not is the task's next. It is not
                offered the last output, and an exception that it raises is raised in the task.
        """
        self._consume = consume

    def __aiter__(self) -> RequestOutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, once there is one.

        Raises:
            EngineDeadError: The engine stopped before the request ended; the cause is kept.
        """
        state = self._state
        while not self._has_ended:
            if self._passed is not None:
                passed, self._passed = self._passed, None
                if isinstance(passed, Exception):
                    raise passed
                return await self._finish_output(passed)
            if state.has_new_output:
                output = state.make_request_output()
                if state.undecodable_core_ids:
                    self._finish_undecodable(state)
                if output is not None:
                    return await self._finish_output(output)
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

    async def _finish_output(self, output: RequestOutput) -> RequestOutput:
        """The next output, validated if need be."""
        if output.relaxations and (texts := self._state.texts_to_validate(output)):
            self._passed = output  # a wait that is cancelled loses no output
            await self._validator.validate_async(texts, current_client.get())
            self._passed = None
        self._has_ended = output.finished
        return output

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
        """Wakes the task that waits for the next output, or has the output offered to the consumer."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._consume is None or not self._state.num_unfinished:
            waiter.set_result(None)
        elif not self._is_scheduled:  # later, so that outputs that arrive together become one
            self._is_scheduled = True
            waiter.get_loop().call_soon(self._offer)

    def fail(self, error: EngineDeadError) -> None:
        """Raises `error` in the caller, after the outputs that have arrived."""
        self._error = error
        self.notify()

    def _offer(self) -> None:
        """Offers the next output to the consumer, and wakes the task if it is not used up."""
        self._is_scheduled = False
        waiter, state = self._waiter, self._state
        if waiter is None or waiter.done():
            return  # the task is not waiting, or will run
        if self._consume is not None and state.has_new_output and state.num_unfinished and not self._has_ended:
            try:
                output = state.make_request_output()
                if state.undecodable_core_ids:
                    self._finish_undecodable(state)
                if output is None or (not output.finished and self._consume(output)):
                    return
                self._passed = output
            except Exception as e:  # noqa: BLE001  (raised in the task)
                self._passed = e
        waiter.set_result(None)
