"""The engine requests of one HTTP request: one for each prompt, started and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.outputs import CompletionOutput, RequestOutput
from mvllm.engine.frontend.request_output_stream import Consume, RequestOutputStream
from mvllm.entrypoints.openai.common.errors import APIError, renamed_fields
from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import MAX_ENTRIES, SamplingParams

logger = get_logger(__name__)

_Item = tuple[int, RequestOutput | Exception | None]


class EngineRequests:
    """The engine requests of one HTTP request, one for each prompt. To be closed, however they end.

    Args:
        streams: The outputs of each prompt.
        constraint: Structured output that the HTTP request asks for.

    Attributes:
        relaxations: What of the constraint's JSON schema is not enforced while the output is generated.
        warnings: What of it the outputs read so far do not satisfy; None if it is enforced whole, or none has ended.
    """

    def __init__(self, streams: Sequence[RequestOutputStream], constraint: OutputConstraint | None = None) -> None:
        self._streams = streams
        self._constraint = constraint
        self._first: RequestOutput | None = None  # of the first prompt, read by `start`
        self.relaxations: tuple[str, ...] = ()
        self.warnings: list[str] | None = None

    @classmethod
    async def start(
        cls,
        engine: AsyncLLM,
        request_id: str,
        prompts: Sequence[PromptType],
        params: SamplingParams | Sequence[PoolingParams],
        priority: int = 0,
        constraint: OutputConstraint | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EngineRequests:
        """Adds all prompts to the engine, or none.

        With a constraint it waits for the first output: its grammar is compiled by then, so an error of it is raised
        here, before the response begins.

        Args:
            request_id: Shared by the engine requests.
            params: Sampling parameters of all prompts, or pooling parameters of each.
            constraint: Where `params.structured_outputs` comes from.
            lora_request: The adapter for all prompts.

        Raises:
            RequestError: A prompt, a setting or the constraint is not acceptable.
            UnavailableError: The engine's queue is full, or it does not accept requests.
            APIError: A sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """
        is_pooling = not isinstance(params, SamplingParams)
        if isinstance(params, SamplingParams):
            check_num_entries(params, len(prompts))
            params_of_each: Sequence[SamplingParams | PoolingParams] = [params] * len(prompts)
        else:
            params_of_each = params
        with renamed_fields({} if constraint is None else {"structured_outputs": constraint.field}):
            streams = await engine.add_requests(
                prompts, params_of_each, request_id, priority=priority, pooling=is_pooling, lora_request=lora_request
            )
        requests = cls(streams, constraint)
        if constraint is not None:
            try:
                await requests._wait_first_output()
            except BaseException:
                requests.close()
                raise
        return requests

    async def _wait_first_output(self) -> None:
        """Reads the first output of the first prompt; all prompts have the same constraint."""
        async for output in self._streams[0]:
            self._first = output
            self.relaxations = output.relaxations
            self._raise_errors(output)
            return

    @property
    def num_prompts(self) -> int:
        """The number of prompts."""
        return len(self._streams)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts and of what was generated so far."""
        return sum(stream.num_prompt_tokens + stream.num_generated_tokens for stream in self._streams)

    def set_consumer(self, consume: Consume) -> None:
        """Has outputs offered to a function first, if there is one prompt. See `RequestOutputStream.set_consumer`."""
        if len(self._streams) == 1:
            self._streams[0].set_consumer(consume)

    async def collect(self) -> list[RequestOutput]:
        """The final output of each prompt, in order.

        Raises:
            APIError: A sequence failed in the engine, or was aborted before it started.
            EngineDeadError: The engine has stopped.
        """
        outputs = []
        for stream in self._streams:  # in turn: each stream keeps its outputs until they are read
            output = self._pop_first_output() if stream is self._streams[0] else None
            async for latest in stream:
                output = latest
            if output is None:
                raise APIError(
                    503, "The request was aborted before it started; try again.", code="aborted", retry_after=1
                )
            self._raise_errors(output)
            self._note_warnings(output)
            outputs.append(output)
        return outputs

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all prompts as they are generated, each with the index of its prompt."""
        first = self._pop_first_output()
        if first is not None:
            self._note_warnings(first)
            yield 0, first
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                self._note_warnings(output)
                yield 0, output
            return
        # A task waits until its last output has been read; the engine joins the outputs that come before.
        queue: asyncio.Queue[_Item] = asyncio.Queue(1)
        tasks = [asyncio.create_task(_feed(queue, i, stream)) for i, stream in enumerate(self._streams)]
        num_open = len(tasks)
        try:
            while num_open:
                position, item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    self._note_warnings(item)
                    yield position, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def warning_fields(self) -> dict[str, Any]:
        """The field `warnings` of the response, if there are some."""
        return {} if self.warnings is None else {"warnings": self.warnings}

    def error_of(self, sequence: CompletionOutput) -> Exception:
        """The error to raise for a sequence that failed. Logs its cause."""
        if sequence.error_parameter is not None:
            field, message = sequence.error_parameter, sequence.error or ""
            if self._constraint is not None and field == "structured_outputs":
                field = self._constraint.field
                if message.startswith("structured_outputs:"):
                    message = field + message.removeprefix("structured_outputs")
            return RequestError(message, parameter=field)
        logger.error("The engine could not finish a request: %s", sequence.error)
        return APIError(500, "The engine could not finish the request; see the server's log.", code="engine_error")

    def _note_warnings(self, output: RequestOutput) -> None:
        if output.relaxations:
            for sequence in output.outputs:
                if sequence.warnings is not None and sequence.finish_reason is not None:
                    self.warnings = [*dict.fromkeys([*(self.warnings or ()), *sequence.warnings])]

    def _raise_errors(self, output: RequestOutput) -> None:
        for sequence in output.outputs:
            if sequence.finish_reason == "error":
                raise self.error_of(sequence)

    def _pop_first_output(self) -> RequestOutput | None:
        first, self._first = self._first, None
        return first

    def close(self) -> None:
        """Aborts what has not finished. Idempotent."""
        for stream in self._streams:
            stream.close()


def check_num_entries(params: SamplingParams, num_prompts: int) -> None:
    """Checks that the lists of sampling parameters are short enough to be validated for each sequence.

    Raises:
        RequestError: They have too many entries.
    """
    num_sequences = num_prompts * (1 if params.use_beam_search else params.num_sequences)
    if num_sequences > 1 and params.num_entries * num_sequences > MAX_ENTRIES:
        raise RequestError(
            f"The lists and texts among the settings of one request may have {MAX_ENTRIES} entries, counted once for "
            f"each sequence; these have {params.num_entries} for each of {num_sequences}. Send several requests.",
            parameter="prompt" if num_prompts > 1 else "n",
        )


async def _feed(queue: asyncio.Queue[_Item], position: int, stream: RequestOutputStream) -> None:
    try:
        async for output in stream:
            await queue.put((position, output))
    except Exception as e:  # noqa: BLE001  (raised by the reader of the queue)
        await queue.put((position, e))
    else:
        await queue.put((position, None))
