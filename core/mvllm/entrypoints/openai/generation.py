"""One HTTP request's way through the engine: a request of its own for each prompt, and all of them end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.outputs import RequestOutput
from mvllm.engine.request_stream import RequestStream
from mvllm.entrypoints.openai.errors import APIError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams

logger = get_logger(__name__)

_Item = tuple[int, RequestOutput | Exception | None]


class Generation:
    """The engine's requests for one HTTP request. To be closed, however it ends.

    Args:
        streams: Their outputs, by prompt.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams

    @classmethod
    async def start(
        cls,
        engine: AsyncLLM,
        call_id: str,
        prompts: Sequence[PromptType],
        params: SamplingParams,
        priority: int | None,
    ) -> Generation:
        """Hands all prompts to the engine, or none.

        Args:
            call_id: What the engine's requests are called.
            params: The same for all prompts.

        Raises:
            RequestError: A prompt or a setting is not acceptable.
            UnavailableError: The engine takes no more requests now.
            EngineDeadError: The engine has stopped.
        """
        return cls(await engine.add_requests(prompts, [params] * len(prompts), call_id, priority=priority or 0))

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return len(self._streams)

    async def collect(self) -> list[RequestOutput]:
        """The final output of each prompt, in order.

        Raises:
            APIError: A sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """
        outputs = []
        for stream in self._streams:  # one after the other: what comes for the later ones is kept for us
            output: RequestOutput | None = None
            async for latest in stream:
                output = latest
            if output is None:
                raise APIError(503, "The request was dropped before it had begun.", code="aborted", retry_after=1)
            for sequence in output.outputs:
                if sequence.finish_reason == "error":
                    raise failed_in_engine(sequence.error)
            outputs.append(output)
        return outputs

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What is new about each prompt, with the prompt's position, until all have ended."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        # Each of the tasks waits until its last piece has been taken; the engine joins what comes meanwhile.
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
                    yield position, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Drops what has not ended. Idempotent."""
        for stream in self._streams:
            stream.close()


async def _feed(queue: asyncio.Queue[_Item], position: int, stream: RequestStream) -> None:
    try:
        async for output in stream:
            await queue.put((position, output))
    except Exception as e:  # noqa: BLE001  (raised where the queue is read)
        await queue.put((position, e))
    else:
        await queue.put((position, None))


def failed_in_engine(reason: str | None) -> APIError:
    """What a client is told about a sequence that failed."""
    logger.error("The engine could not finish a request: %s", reason)
    return APIError(500, "The engine could not finish the request; the server's log tells more.", code="engine_error")
