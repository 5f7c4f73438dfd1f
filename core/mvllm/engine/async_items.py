"""The part of AsyncLLM that prepares images, audio and videos of prompts. No method blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from mvllm.engine.frontend.admission import AdmissionControl
from mvllm.engine.frontend.input_processor import InputProcessor, ProcessedRequest
from mvllm.engine.frontend.prompt_items import PreparedItems, PromptItems, with_contents
from mvllm.engine.frontend.tokenization_cost import num_text_chars
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.errors import RequestError
from mvllm.messages.commands import ResetEncoderCache
from mvllm.messages.inputs import EmbedsPrompt, ExpandedPrompt, PromptType
from mvllm.messages.multimodal import EMBEDS
from mvllm.multimodal.item_memory import ItemLease, LeasedArray, LeasedItems, lease_of
from mvllm.multimodal.item_request import has_items
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processor_client import ProcessorClient, RemoteItem

_MAX_AHEAD = 32
"""Prompts of one call that are prepared at the same time."""


class AsyncItems:
    """Prepares the images, audio, videos and embeddings of prompts of an AsyncLLM.

    Args:
        client: Its engine cores.
        item_client: Prepares items in other processes.
        input_processor: Puts them into prompts.
        admission: Counts prompts that are prepared.
        run_in_thread: Runs work of the tokenizer with texts of so many characters in a thread.
        require_alive: Raises if the engine has stopped.
        require_ready: Raises if the engine accepts no requests.
    """

    def __init__(
        self,
        client: AsyncEngineCoreClient,
        item_client: ProcessorClient,
        input_processor: InputProcessor,
        admission: AdmissionControl,
        run_in_thread: Callable[[Callable[[], ExpandedPrompt], int], Awaitable[ExpandedPrompt]],
        require_alive: Callable[[], None],
        require_ready: Callable[[], None],
    ) -> None:
        self._client = client
        self._item_client = item_client
        self._input_processor = input_processor
        self._admission = admission
        self._run_in_thread = run_in_thread
        self._require_alive = require_alive
        self._require_ready = require_ready

    async def expand_prompt(self, prompt: PromptType) -> ExpandedPrompt:
        """A prompt with its items prepared and in their places, tokenized. `generate` takes it.

        Raises:
            RequestError: The prompt or an item is not acceptable.
            UnavailableError, EngineDeadError: As `generate`.
        """
        self._require_ready()
        self._admission.check_capacity(1, 0)
        with self._admission.tokenizing(1), await prepare_items(self._input_processor.items, [prompt]) as prepared:
            items = () if prepared.items is None else prepared.items[0]
            expand = partial(self._input_processor.expand, prompt, items)
            found = await self._run_in_thread(expand, num_text_chars([prompt]))
            found["multi_modal_items"] = LeasedItems(found["multi_modal_items"], prepared.leases[0])
            return found

    async def reset_mm_cache(self) -> bool:
        """Drops prepared items of this front end, also those in work, and the encoder cache. The prefix cache stays.

        Returns:
            False if running requests use some results of encoders, which are kept.
        """
        self._require_alive()
        self._item_client.cache.clear()
        return await self._client.call(ResetEncoderCache())

    async def item_placeholders(self) -> dict[str, str]:
        """By modality, what stands for an item in the text of a prompt, as the model's processor tells.

        Raises:
            RequestError: The processor cannot be loaded.
        """
        known = self._item_client.known_placeholders
        # The threads may be busy with files for minutes.
        return await asyncio.to_thread(self._item_client.placeholders) if known is None else known

    async def read_prompt_embeds(self, files: Sequence[str]) -> list[EmbedsPrompt]:
        """The prompts in files with embeddings: of numpy (`.npy`), safetensors or torch. Another process reads them,
        when there is memory for them.

        Args:
            files: Their contents, base64.

        Raises:
            RequestError: The engine takes none, or a file is not acceptable.
        """
        self._input_processor.items.check_embeds_enabled()
        with self._admission.tokenizing(len(files)):
            lease = await asyncio.wrap_future(self._item_client.memory.reserve({EMBEDS: len(files)}))
            try:
                arrays = [await asyncio.to_thread(self._item_client.read_embeddings, file) for file in files]
                leases = lease.split([[(EMBEDS, len(array.data))] for array in arrays])
            finally:
                lease.release()  # if it was not split
        return [{"prompt_embeds": LeasedArray(*each)} for each in zip(arrays, leases, strict=True)]


@dataclass(frozen=True)
class PreparedPrompts:
    """The items of the prompts of one call. As a context, it releases the leases if an error leaves it: nobody knows
    how long the frames live to which an error refers.

    Attributes:
        items: Those of each prompt; None if no prompt has any to prepare.
        leases: The memory of each prompt's items; None for a prompt without.
    """

    items: list[PreparedItems] | None
    leases: list[ItemLease | None]

    def with_leases(self, requests: Sequence[ProcessedRequest]) -> Sequence[ProcessedRequest]:
        """The requests of the prompts, each with the lease of its prompt."""
        for request, lease in zip(requests, self.leases, strict=True):
            request.item_lease = lease
        return requests

    def __enter__(self) -> PreparedPrompts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            for lease in self.leases:
                if lease is not None:
                    lease.release()


async def prepare_items(items: PromptItems, prompts: Sequence[object]) -> PreparedPrompts:
    """Prepares the items of prompts, when there is memory for them.

    Raises:
        RequestError: An item is not acceptable, or the items of several prompts take more than all of the memory. With
            several prompts, the message has the position of the prompt.
    """
    if not any(map(has_items, prompts)):
        return PreparedPrompts(None, list(map(lease_of, prompts)))
    futures: list[Future[list[ProcessedItem]] | None] = []
    remote: list[list[RemoteItem]] = []
    found: list[PreparedItems] = []
    lease: ItemLease | None = None
    position = num_bytes = num_prompts = 0
    group = items.fetch_group()
    try:
        for position in range(len(prompts)):
            items.check(prompts[position])
        # Before anything is taken that others wait for: a host may not answer.
        remote = [items.start_fetching(prompt, group) for prompt in prompts]
        fetched = []
        for position, prompt in enumerate(prompts):
            fetched.append(await _with_fetched(prompt, remote[position]))
            if position and group.num_bytes > items.max_bytes:
                raise _too_many_bytes(position + 1, group.num_bytes, items.max_bytes)
        # Together: prompts of one call that waited for each other's memory would wait for ever.
        lease = await asyncio.wrap_future(items.reserve(prompts))
        for position in range(len(prompts)):
            # Few at a time: what is prepared behind a slow one is not counted yet.
            futures += map(items.submit, fetched[len(futures) : position + _MAX_AHEAD])
            future = futures[position]
            if future is None:
                found.append(())
                continue
            prepared: list[ProcessedItem] = await asyncio.wrap_future(future)
            found.append(prepared)
            num_bytes += sum(item.num_bytes for item in prepared)
            num_prompts += 1
            if num_prompts > 1 and num_bytes > items.max_bytes:
                raise _too_many_bytes(num_prompts, num_bytes, items.max_bytes)
        leases = lease.split([[(item.modality, item.num_bytes) for item in each] for each in found])
        return PreparedPrompts(found, [lease_of(prompt) or leases[i] for i, prompt in enumerate(prompts)])
    except RequestError as e:
        if len(prompts) == 1:
            raise
        raise RequestError(f"Prompt {position} of {len(prompts)}: {e}", parameter=e.parameter) from e
    finally:
        if lease is not None:
            lease.release()  # if it was not split
        _cancel(futures, remote)
        group.end()
        futures, future = [], None  # the error of one refers to this frame, which would live on with all features


async def _with_fetched(prompt: object, remote: Sequence[RemoteItem]) -> object:
    """A prompt with the contents of its items that are fetched."""
    contents = {(item.modality, item.position): await asyncio.wrap_future(item.content) for item in remote}
    return with_contents(prompt, contents)


def _cancel(futures: Sequence[Future[list[ProcessedItem]] | None], remote: Sequence[Sequence[RemoteItem]]) -> None:
    for future in futures:
        if future is not None:
            future.cancel()
    for items in remote:
        for item in items:
            item.content.cancel()


def _too_many_bytes(num_prompts: int, num_bytes: int, max_bytes: int) -> RequestError:
    return RequestError(
        f"The items of the first {num_prompts} prompts with items take {num_bytes} bytes, but those of one request may "
        f"take {max_bytes} (mm_inflight_gb). Send several requests.",
        parameter="multi_modal_data",
    )
