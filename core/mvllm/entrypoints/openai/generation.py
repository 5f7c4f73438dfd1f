"""One HTTP request's way through the engine: a request of its own for each prompt, and all of them end together.

Whoever leaves early, by an error or a cancellation, closes the generators, and the engine drops what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.outputs import RequestOutput
from mvllm.entrypoints.openai.errors import APIError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams

logger = get_logger(__name__)


@dataclass(frozen=True)
class Call:
    """What the engine is asked for on behalf of one HTTP request.

    Attributes:
        call_id: The id that the answer has; the engine's requests are called after it.
        prompts: One or several.
        params: The same for all of them.
        priority: Lower is served earlier.
    """

    call_id: str
    prompts: Sequence[PromptType]
    params: SamplingParams
    priority: int = 0

    def generators(self, engine: AsyncLLM) -> list[AsyncGenerator[RequestOutput, None]]:
        """One for each prompt; nothing happens before they are iterated."""
        return [
            engine.generate(prompt, self.params, f"{self.call_id}-{i}", priority=self.priority)
            for i, prompt in enumerate(self.prompts)
        ]


async def collect(engine: AsyncLLM, call: Call) -> list[RequestOutput]:
    """The final output of each prompt, in order.

    Raises:
        RequestError: One of the prompts or the settings is not acceptable; the others are dropped.
        APIError: A sequence failed in the engine.
    """
    generators = call.generators(engine)
    if len(generators) == 1:
        outputs = [await _last(generators[0])]
    else:
        tasks = [asyncio.create_task(_last(generator)) for generator in generators]
        try:
            outputs = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for output in outputs:
        for sequence in output.outputs:
            if sequence.finish_reason == "error":
                raise failed_in_engine(sequence.error)
    return outputs


async def stream(engine: AsyncLLM, call: Call) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What is new about each prompt, with the prompt's position, until all have ended."""
    generators = call.generators(engine)
    if len(generators) == 1:
        async with contextlib.aclosing(generators[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # As many as there are prompts: each waits until its last piece has been taken, and the engine joins what comes
    # meanwhile.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_feed(queue, i, generator)) for i, generator in enumerate(generators)]
    num_open = len(tasks)
    try:
        while num_open:
            position, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield position, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]],
    position: int,
    generator: AsyncGenerator[RequestOutput, None],
) -> None:
    try:
        async with contextlib.aclosing(generator) as outputs:
            async for output in outputs:
                await queue.put((position, output))
    except Exception as e:  # noqa: BLE001  (raised where the queue is read)
        await queue.put((position, e))
    else:
        await queue.put((position, None))


async def _last(generator: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    last: RequestOutput | None = None
    async with contextlib.aclosing(generator) as outputs:
        async for last in outputs:
            pass
    if last is None:
        raise APIError(503, "The request was dropped before it had begun.", code="aborted", retry_after=1)
    return last


def failed_in_engine(reason: str | None) -> APIError:
    """What a client is told about a sequence that failed."""
    logger.error("The engine could not finish a request: %s", reason)
    return APIError(500, "The engine could not finish the request; the server's log tells more.", code="engine_error")
