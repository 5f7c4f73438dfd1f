"""ProcessorClient: prepares the items of prompts in processes of their own, and keeps what they have prepared.

    a thread per prompt                  processors (num_processes)
    -------------------                  --------------------------
    fetches each item's content
    looks into the cache
    sends the others            ──▶      decodes and processes one item at a time
                                ◀──      features, replacement

A processor starts with the first item, and again after it ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import msgspec

from mvllm.config.model import ModelConfig
from mvllm.config.multimodal import MultiModalConfig
from mvllm.errors import RequestError
from mvllm.executor.process.pipe_process import PipeProcess, PipeProcessError
from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal.item_request import ItemRequest, read_item_request
from mvllm.multimodal.media_source import MediaSource, decode_base64, load_source
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processed_item_cache import ProcessedItemCache, digest_source
from mvllm.multimodal.processor_messages import ItemJob, ItemResult, ProcessorStart

ITEM_SECONDS = 60.0
"""Processor time for one item."""
WALL_SECONDS = 180.0
"""Longest time for one item, the start of the process included."""

_NUM_PROMPT_THREADS = 32
_NUM_FETCH_THREADS = 16
_MODULE = "mvllm.multimodal.processor_main"

OnProcessed = Callable[[bool, float], None]
"""Called with whether an item was found in the cache, and with the seconds that preparing it took."""


class ProcessorClient:
    """Prepares items. Threads and processes start with the first item.

    Args:
        model: The model's configuration.
        config: The settings of inputs beside text.

    Attributes:
        cache: What is kept.
        on_processed: Called for each item, from any thread.
    """

    def __init__(self, model: ModelConfig, config: MultiModalConfig) -> None:
        self._model = model
        self._config = config
        self.on_processed: OnProcessed = lambda is_cached, seconds: None
        self.cache = ProcessedItemCache(config.processor_cache_bytes)
        self._lock = threading.Lock()
        self._processors: list[_Processor] = []
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

    def submit(self, prompt: Mapping[str, Any]) -> Future[list[ProcessedItem]]:
        """As `process`, in a thread.

        Raises:
            RequestError: The prompt asks for what the model does not take.
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
        self._start()
        result = self._next_processor().run(ItemJob(MediaSource("embeds", "encoded", data), {}, seconds=ITEM_SECONDS))
        assert result.embeds is not None
        return result.embeds

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [pid for processor in self._processors if (pid := processor.pid) is not None]

    def close(self) -> None:
        """Ends threads and processes. Idempotent."""
        with self._lock:
            self._is_closed = True
            processors, self._processors = self._processors, []
            pools = [self._prompt_threads, self._fetch_threads]
        for processor in processors:
            processor.close()
        for pool in pools:
            if pool is not None:  # queued work raises an error; callers would mistake a cancellation for their own
                pool.shutdown(wait=False)

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise RequestError("The engine is shutting down.")
            if self._processors:
                return
            start = _start_message(self._model, self._config)
            self._processors = [_Processor(start) for _ in range(self._config.num_processes)]
            self._prompt_threads = ThreadPoolExecutor(_NUM_PROMPT_THREADS, thread_name_prefix="items")
            self._fetch_threads = ThreadPoolExecutor(_NUM_FETCH_THREADS, thread_name_prefix="media")

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
        started = time.monotonic()
        source = load_source(modality, value, self._config)
        digest = digest_source(source, request.kwargs, uuid)
        found = self.cache.get(digest, request.counts)
        if found is not None:
            self.on_processed(True, time.monotonic() - started)
            return found
        result = self._next_processor().run(ItemJob(source, request.counts, request.kwargs, uuid, ITEM_SECONDS))
        assert result.item is not None
        self.cache.put(digest, request.counts, result.item, depends_on_counts=result.depends_on_counts)
        self.on_processed(False, time.monotonic() - started)
        return result.item

    def _next_processor(self) -> _Processor:
        with self._lock:
            if not self._processors:
                raise RequestError("The engine is shutting down.")
            return min(self._processors, key=lambda processor: processor.num_waiting)


class _Processor:
    """One process, and the thread that speaks to it: the process dies with the thread that started it."""

    def __init__(self, start: ProcessorStart) -> None:
        self._process = PipeProcess(_MODULE, start)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="item-processor")
        self.num_waiting = 0

    def run(self, job: ItemJob) -> ItemResult:
        """Runs a job. Blocks.

        Raises:
            RequestError: It has failed.
        """
        self.num_waiting += 1
        try:
            result = self._thread.submit(self._run, job).result()
        except (RuntimeError, CancelledError) as e:  # closed
            raise RequestError("The engine is shutting down.") from e
        finally:
            self.num_waiting -= 1
        if result.error is not None:
            raise RequestError(result.error, parameter=result.parameter)
        return result

    def _run(self, job: ItemJob) -> ItemResult:
        try:
            result = self._process.run(job, ItemResult, WALL_SECONDS)
        except PipeProcessError as e:
            modality = job.source.modality
            return ItemResult(error=_FAILURES[e.reason].format(modality), parameter="multi_modal_data")
        if result.is_last:
            self._process.kill()
        return result

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()


_FAILURES = {
    "time": f"Decoding and processing the {{}} takes more than {ITEM_SECONDS:g} s.",
    "memory": "The {} cannot be decoded: the decoder crashed, or needs more memory than allowed.",
    "timeout": f"Decoding and processing the {{}} took longer than {WALL_SECONDS:g} s; try again.",
    "killed": "The process that decodes the {} was killed twice while it worked on it; try again.",
    "closed": "The engine is shutting down; the {} was not processed.",
}


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
    )
