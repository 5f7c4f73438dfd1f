"""The methods of AsyncLLM that prepare images, audio and videos of prompts. None blocks the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from mvllm.engine.frontend.admission import AdmissionControl
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.frontend.prompt_items import PreparedItems, PromptItems
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.errors import RequestError
from mvllm.messages.inputs import EmbedsPrompt, ExpandedPrompt, PromptType
from mvllm.multimodal.item_request import has_items
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processor_client import ProcessorClient

_T = TypeVar("_T")


class AsyncItems(ABC):
    """Base of AsyncLLM, which defines the attributes that it uses."""

    input_processor: InputProcessor
    item_client: ProcessorClient
    _admission: AdmissionControl
    _client: AsyncEngineCoreClient

    @abstractmethod
    def _require_alive(self) -> None:
        """Raises if the engine has stopped."""

    @abstractmethod
    def _require_ready(self) -> None:
        """Raises if the engine accepts no requests."""

    @abstractmethod
    async def _run_in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs work of the tokenizer in a thread."""

    async def expand_prompt(self, prompt: PromptType) -> ExpandedPrompt:
        """A prompt with its items prepared and in their places, tokenized. `generate` takes it.

        Raises:
            RequestError: The prompt or an item is not acceptable.
            UnavailableError, EngineDeadError: As `generate`.
        """
        self._require_ready()
        self._admission.check_capacity(1, 0)
        with self._admission.tokenizing(1):
            items = await prepare_items(self.input_processor.items, [prompt])
            found = () if items is None else items[0]
            return await self._run_in_thread(lambda: self.input_processor.expand(prompt, found))

    async def reset_mm_cache(self) -> bool:
        """Drops prepared items of this front end, and the encoder cache. The prefix cache stays.

        Returns:
            False if running requests use some results of encoders, which are kept.
        """
        self._require_alive()
        self.item_client.cache.clear()
        return bool(await self._client.call_utility("reset_encoder_cache"))

    async def read_prompt_embeds(self, file: str) -> EmbedsPrompt:
        """The prompt in a file with embeddings: of numpy (`.npy`) or safetensors. Another process reads it.

        Args:
            file: Its content, base64.

        Raises:
            RequestError: The engine takes none, or the file is not acceptable.
        """
        self.input_processor.items.check_embeds_enabled()
        with self._admission.tokenizing(1):
            return {"prompt_embeds": await asyncio.to_thread(self.item_client.read_embeddings, file)}


async def prepare_items(items: PromptItems, prompts: Sequence[object]) -> list[PreparedItems] | None:
    """The prepared items of each prompt; None if no prompt has any.

    Raises:
        RequestError: An item is not acceptable. With several prompts, the message has the position of its prompt.
    """
    if not any(map(has_items, prompts)):
        return None
    futures: list[Future[list[ProcessedItem]] | None] = []
    found: list[PreparedItems] = []
    position = 0
    try:
        for position in range(len(prompts)):
            futures.append(items.submit(prompts[position]))
        for position in range(len(futures)):
            future = futures[position]
            if future is None:
                found.append(())
            else:
                prepared: list[ProcessedItem] = await asyncio.wrap_future(future)
                found.append(prepared)
    except RequestError as e:
        if len(prompts) == 1:
            raise
        raise RequestError(f"Prompt {position} of {len(prompts)}: {e}", parameter=e.parameter) from e
    finally:
        for future in futures:
            if future is not None:
                future.cancel()
    return found
