"""ProcessorClient: prepares the items of prompts in processes of their own, and keeps what they have prepared.

    a thread per prompt                  processes (ProcessorPool)
    -------------------                  -------------------------
    looks into the cache
    sends the others            ──▶      decodes and processes one item at a time
                                ◀──      features, replacement

A process starts with the first item, and again after it ended. A server fetches URLs before, see MediaFetcher.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mvllm.config.model import ModelConfig
from mvllm.config.multimodal import MultiModalConfig
from mvllm.errors import RequestError
from mvllm.messages.multimodal import EMBEDS, ArrayData
from mvllm.multimodal.item_memory import ItemMemory
from mvllm.multimodal.item_request import ItemRequest, read_item_request
from mvllm.multimodal.media_fetcher import FetchGroup, MediaFetcher
from mvllm.multimodal.media_source import (
    MediaSource,
    as_item_list,
    decode_base64,
    fetch_remote,
    is_remote,
    load_source,
)
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processed_item_cache import ProcessedItemCache, digest_source
from mvllm.multimodal.processor_messages import PLACEHOLDERS, ItemJob, ProcessorStart
from mvllm.multimodal.processor_pool import ITEM_SECONDS, ProcessorPool

_NUM_PROMPT_THREADS = 32
_NUM_FETCH_THREADS = 16
_MODULE = "mvllm.multimodal.processor_main"


class ItemObserver(Protocol):
    """Receives measurements of items, for metrics. Its methods are called in any thread."""

    def observe_item(self, is_cached: bool, seconds: float) -> None:
        """An item was found in the cache or not, and preparing it took so many seconds."""

    def observe_item_memory(self, num_bytes: int) -> None:
        """The items of unfinished prompts take so many bytes."""


@dataclass(frozen=True)
class RemoteItem:
    """An item that is fetched.

    Attributes:
        modality, position: Its place in `multi_modal_data`.
        content: Its content.
    """

    modality: str
    position: int
    content: Future[bytes]


class ProcessorClient:
    """Prepares items. Threads and processes start with the first item.

    Args:
        model: The model's configuration.
        config: The settings of inputs beside text.
        observer: Receives the measurements of each item; None for no metrics.

    Attributes:
        cache: What is kept.
        fetcher: Fetches URLs.
        memory: The memory of unfinished prompts. Callers that take prompts without end reserve some for each.
        known_placeholders: The result of `placeholders`, after its first call.
    """

    def __init__(self, model: ModelConfig, config: MultiModalConfig, observer: ItemObserver | None = None) -> None:
        self._model = model
        self._config = config
        self._observer = observer
        self.cache = ProcessedItemCache(config.processor_cache_bytes)
        self.fetcher = MediaFetcher(lambda url: fetch_remote(url, config), config.inflight_bytes // 4)
        self.memory = ItemMemory(config.inflight_bytes, None if observer is None else observer.observe_item_memory)
        self._lock = threading.Lock()
        self._pool: ProcessorPool | None = None
        self.known_placeholders: dict[str, str] | None = None
        self._prompt_threads: ThreadPoolExecutor | None = None
        self._fetch_threads: ThreadPoolExecutor | None = None
        self._is_closed = False

    def process(self, prompt: Mapping[str, Any]) -> list[ProcessedItem]:
        """The processed items of a prompt with `multi_modal_data`. Blocks; callable in any thread.

        Returns:
            Those of each modality in their order.

        Raises:
            RequestError: An item is not acceptable, or its decoder failed.
        """
        return self._process(read_item_request(prompt, self._model, self._config))

    def check(self, prompt: Mapping[str, Any]) -> None:
        """Checks a prompt with `multi_modal_data`, but not its contents.

        Raises:
            RequestError: The prompt asks for what the model does not take.
        """
        read_item_request(prompt, self._model, self._config)

    def start_fetching(self, prompt: Mapping[str, Any], group: FetchGroup) -> list[RemoteItem]:
        """Begins to fetch the items of a prompt that are URLs of other hosts.

        Raises:
            RequestError: The engine is shutting down.
        """
        data = prompt["multi_modal_data"]
        return [
            RemoteItem(str(modality), position, self.fetcher.submit(value, group))
            for modality, values in data.items()
            if values is not None
            for position, value in enumerate(as_item_list(values, str(modality)))
            if is_remote(value)
        ]

    def submit(self, prompt: Mapping[str, Any]) -> Future[list[ProcessedItem]]:
        """As `process`, in a thread.

        Raises:
            RequestError: As `check`.
        """
        request = read_item_request(prompt, self._model, self._config)
        self._start()
        assert self._prompt_threads is not None
        try:
            return self._prompt_threads.submit(self._process, request)
        except RuntimeError as e:  # closed
            raise RequestError("The engine is shutting down.") from e

    def read_embeddings(self, file: str) -> ArrayData:
        """The ready embeddings in a file, base64, read in a processor's process. Blocks.

        Raises:
            RequestError: The file is not acceptable.
        """
        data = decode_base64(file, self._config, parameter="prompt_embeds")
        result = self._start().run(ItemJob(MediaSource(EMBEDS, "encoded", data), {}, seconds=ITEM_SECONDS))
        assert result.embeds is not None
        return result.embeds

    def placeholders(self) -> dict[str, str]:
        """By modality, what stands for an item in the text of a prompt. Blocks until a processor has told it once.

        Raises:
            RequestError: The model's processor cannot be loaded.
        """
        if self.known_placeholders is None:
            self.known_placeholders = self._start().run(ItemJob(MediaSource(PLACEHOLDERS, "", b""), {})).placeholders
        return self.known_placeholders

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [] if self._pool is None else self._pool.pids

    def close(self) -> None:
        """Ends threads and processes. Idempotent."""
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
            threads = [self._prompt_threads, self._fetch_threads]
        self.memory.close()
        self.fetcher.close()
        if pool is not None:
            pool.close()
        for each in threads:
            if each is not None:  # queued work raises an error; callers would mistake a cancellation for their own
                each.shutdown(wait=False)

    def _start(self) -> ProcessorPool:
        with self._lock:
            if self._is_closed:
                raise RequestError("The engine is shutting down.")
            if self._pool is None:
                self._pool = _make_pool(_start_message(self._model, self._config))
                weakref.finalize(self, self._pool.close)  # of who forgets `close`
                self._prompt_threads = ThreadPoolExecutor(_NUM_PROMPT_THREADS, thread_name_prefix="items")
                self._fetch_threads = ThreadPoolExecutor(_NUM_FETCH_THREADS, thread_name_prefix="media")
            return self._pool

    def _process(self, request: ItemRequest) -> list[ProcessedItem]:
        self._start()
        assert self._fetch_threads is not None
        if len(request.items) == 1:
            return [self._process_item(request, *request.items[0])]
        # Not the threads of prompts, which may all be waiting here.
        try:
            futures = [self._fetch_threads.submit(self._process_item, request, *item) for item in request.items]
        except RuntimeError as e:  # closed
            raise RequestError("The engine is shutting down.") from e
        try:
            found: list[ProcessedItem] = []
            num_tokens = 0
            for future in futures:
                found.append(future.result())
                num_tokens += len(found[-1].token_ids)
                self._check_length(num_tokens, len(found))
            return found
        except BaseException:
            for future in futures:
                future.cancel()
            del futures, future  # the error of one refers to this frame, which would live on with all features
            raise

    def _check_length(self, num_tokens: int, num_items: int) -> None:
        """Checks before more items are processed that those so far fit: their features may take gigabytes."""
        limit = self._model.max_model_len
        if num_tokens > limit:
            raise RequestError(
                f"The first {num_items} items of the prompt take {num_tokens} tokens, but prompt and output together "
                f"may have {limit} (max_model_len). Send fewer or smaller ones.",
                parameter="multi_modal_data",
            )

    def _process_item(self, request: ItemRequest, modality: str, value: Any, uuid: str | None) -> ProcessedItem:
        started, generation = time.monotonic(), self.cache.generation
        source = load_source(modality, value, self._config)
        digest = digest_source(source, request.kwargs, uuid, request.cache_salt)
        found = self.cache.get(digest, request.counts)
        if found is not None:
            self._report(True, started)
            return found
        result = self._start().run(ItemJob(source, request.counts, request.kwargs, uuid, ITEM_SECONDS))
        assert result.item is not None
        self.cache.put(
            digest, request.counts, result.item, depends_on_counts=result.depends_on_counts, generation=generation
        )
        self._report(False, started)
        return result.item

    def _report(self, is_cached: bool, started: float) -> None:
        if self._observer is not None:
            self._observer.observe_item(is_cached, time.monotonic() - started)


def _make_pool(start: ProcessorStart) -> ProcessorPool:
    takes = start.model.get("placeholders", {})
    mixed = "image" in takes and len(takes) > 1
    return ProcessorPool(_MODULE, start, start.num_processes, keeps_one_for_images=mixed)


def _start_message(model: ModelConfig, config: MultiModalConfig) -> ProcessorStart:
    return ProcessorStart(
        path=str(model.path),
        architecture=model.architecture,
        trust_remote_code=model.trust_remote_code,
        model={} if model.multimodal is None else msgspec.to_builtins(model.multimodal),
        hf_config=json.dumps(model.hf_config.as_dict()).encode(),
        processor_kwargs=json.dumps(config.processor_kwargs).encode(),
        max_pixels=config.max_pixels,
        max_audio_seconds=config.max_audio_seconds,
        hidden_size=model.hidden_size,
        max_embeddings=model.max_model_len,
        float_dtype="float32" if model.dtype == "auto" else model.dtype,
        num_processes=config.num_processes,
        model_impl=model.model_impl,
    )
