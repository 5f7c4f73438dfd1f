"""AsyncLLM: the engine of a server. Each request is an async iterator in one event loop.

    generate() ── InputProcessor ── AsyncMPClient ══════════ EngineCoreProc
        ^                                  │
        └── RequestOutputStream ── OutputProcessor

There is no queue between engine and caller. Outputs accumulate in the state of the request, and the next
`RequestOutput` is built when the caller awaits it; or when a consumer of the stream takes it, which the server uses to
write most outputs to their connections without a task (`RequestOutputStream.set_consumer`). A slow caller gets fewer
and larger outputs, uses no more memory than its text, and does not delay other callers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig
from mvllm.engine.async_adapters import AsyncAdapters
from mvllm.engine.async_items import AsyncItems, prepare_items
from mvllm.engine.async_rollouts import AsyncRollouts
from mvllm.engine.async_sleep import AsyncSleep
from mvllm.engine.forward import forward
from mvllm.engine.frontend.admission import AdmissionControl
from mvllm.engine.frontend.engine_frontend import EngineFrontend
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.output_processor import OutputProcessorOutput
from mvllm.engine.frontend.outputs import RequestOutput, failure_of
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.engine.frontend.request_state import RequestState
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.frontend.text_threads import TextThreads
from mvllm.engine.frontend.tokenization_cost import num_text_chars, tokenization_cost, total_cost
from mvllm.engine.metrics.periodic_stats_log import PeriodicStatsLog
from mvllm.engine.metrics.stats import EngineLoad, EngineMetrics, EngineMetricsSnapshot, RateMeter
from mvllm.engine.metrics.tracing import Tracer
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient, make_async_client
from mvllm.errors import EngineDeadError, RequestFailedError
from mvllm.logging import get_logger
from mvllm.messages.commands import CallModel, CheckHealth, ResetPrefixCache
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.requests import EngineCoreOutputs, SchedulerStats
from mvllm.messages.sampling_params import SamplingParams

logger = get_logger(__name__)

_DRAIN_POLL_SECONDS = 0.05

_T = TypeVar("_T")


def _rollouts(engine: AsyncLLM) -> AsyncRollouts:
    return engine.rollouts


def _adapters(engine: AsyncLLM) -> AsyncAdapters:
    return engine.adapters


def _sleep_mode(engine: AsyncLLM) -> AsyncSleep:
    return engine.sleep_mode


def _items(engine: AsyncLLM) -> AsyncItems:
    return engine.items


class AsyncLLM(EngineFrontend[AsyncEngineCoreClient]):
    """An engine for use in an event loop. The engine core runs in its own process.

    The constructor loads the model; call it in any thread, with or without a running loop. All methods must then be
    called in one event loop, the first one that uses the engine. `shutdown` frees the model's memory.

    Args:
        config: The requested configuration. The platform may change it; the attribute `config` is the one in use.
        log_stats: Log the engine's load every ten seconds while it is busy, unless the configuration excludes it.
        client: An engine core to use instead of a new one.
        name: Prefix of the request ids in the engine core, if several front ends share it.
        other_metrics: Returns the metrics of the other front ends.

    Attributes:
        config: The configuration in use.
        input_processor, pooling_input_processor: The validators of requests.
        metrics: Counters and histograms since the start, for `mvllm.engine.metrics.prometheus`.
        tracer: Writes spans of requests. Set it before the first request; the caller closes it.
        items: Prepares images, audio, videos and embeddings of prompts.
        rollouts: Pauses the engine and changes its weights.
        adapters: Loads, unloads and replaces LoRA adapters.
        sleep_mode: Puts the engine to sleep and wakes it up.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started. No process or memory is left behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_stats: bool = True,
        client: AsyncEngineCoreClient | None = None,
        name: str = "",
        other_metrics: Callable[[], Iterable[EngineMetricsSnapshot]] = tuple,
    ) -> None:
        super().__init__(config, make_async_client, client, name)
        self._prompt_rate, self._generation_rate = RateMeter(), RateMeter()
        self._other_metrics = other_metrics
        self._admission = AdmissionControl(self.config, self._output_processor, self._client, self.metrics)
        self.tracer: Tracer | None = None
        self._request_ids = itertools.count()
        self._fatal_error: EngineDeadError | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = TextThreads("tokenizer")
        self.rollouts = AsyncRollouts(self._client, self._require_alive)
        self.adapters = AsyncAdapters(
            self._client, self._lora_validator, self.rollouts, self._run_in_thread, self._require_alive
        )
        self.sleep_mode = AsyncSleep(
            self._client, self._abort_all, self._require_alive, lambda: self._fatal_error is not None
        )
        self.items = AsyncItems(
            self._client,
            self.item_client,
            self.input_processor,
            self._admission,
            self._run_in_thread,
            self._require_alive,
            self._require_ready,
        )
        logs = log_stats and config.log_stats
        self._stats_log = PeriodicStatsLog(lambda: self.load, lambda: self.stats) if logs else None

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, log_stats: bool = True) -> AsyncLLM:
        """Builds an engine from `EngineArgs`. It loads the model, which takes seconds or minutes: call it before the
        loop runs, or in a thread (`asyncio.to_thread`)."""
        return cls(requested_config(args), log_stats=log_stats)

    # --- requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        raise_on_error: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates from one prompt. What each output contains depends on `sampling_params.output_kind`.

        Ending the iteration early, also by an exception or a cancellation, aborts the request in any state.

        Args:
            prompt: A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: None takes the model's defaults. With `n` > 1, outputs hold several sequences.
            request_id: The caller's id; need not be unique. By default a number.
            priority: Lower is served earlier; without effect unless the policy is `priority`.
            arrival_time: Monotonic seconds; now by default.
            lora_request: The LoRA adapter to apply; it is loaded if necessary.
            raise_on_error: Raise an error in place of the last output if the request failed while it was processed. If
                False, that output has the finish reason `error` and an `error`.

        Raises:
            RequestError: The request is invalid; nothing was queued.
            RequestFailedError: See `raise_on_error`; its `outputs` has the last output.
            UnavailableError: Too many requests are waiting, or the engine sleeps; nothing was queued.
            EngineDeadError: The engine has stopped; the cause is kept.
            RuntimeError: Another event loop was the first to use the engine.
        """
        async with await self.add_request(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            arrival_time=arrival_time,
            lora_request=lora_request,
        ) as stream:
            async for output in stream:
                if raise_on_error and output.finished and (failure := failure_of(output)) is not None:
                    raise RequestFailedError(failure[0], parameter=failure[1], outputs=[output])
                yield output

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Computes the embedding or the scores of one prompt, in one output. Ending the iteration before the output
        aborts the request.

        Args:
            prompt, request_id, priority, arrival_time: As for `generate`; a prompt may be as long as `max_model_len`.
            pooling_params: None takes the model's defaults.

        Raises:
            PlatformError: The model returned NaN or infinity.
            RequestError, UnavailableError, EngineDeadError, RuntimeError: As `generate`.
        """
        (stream,) = await self.add_requests(
            [prompt], [pooling_params], request_id, priority=priority, arrival_time=arrival_time, pooling=True
        )
        async with stream:
            async for output in stream:
                yield PoolingRequestOutput.from_request_output(output)

    async def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutputStream:
        """Same as `generate`, but the request has been validated and queued when this returns.

        The stream must be read to its end, or closed.
        """
        (stream,) = await self.add_requests(
            [prompt],
            [sampling_params],
            request_id,
            priority=priority,
            arrival_time=arrival_time,
            lora_request=lora_request,
        )
        return stream

    async def add_requests(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams | None],
        request_id: str | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        pooling: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutputStream]:
        """Queues several prompts under one id. All of them are validated before the first is queued.

        Args:
            params: One per prompt: PoolingParams if `pooling`, else SamplingParams.
            pooling: Compute pooled outputs, for `PoolingRequestOutput.from_request_output`, and generate nothing.
            lora_request: The adapter for all of them.

        Raises:
            As `generate`. A RequestError names the prompt by its position.
        """
        arrived = time.monotonic() if arrival_time is None else arrival_time
        self._require_ready()
        self._admission.check_capacity(len(prompts), 0)  # before tokenizing
        if request_id is None:
            request_id = str(next(self._request_ids))
        ids = [request_id] * len(prompts)
        processor = self.pooling_input_processor if pooling else self.input_processor
        with self._admission.tokenizing(len(prompts)):
            prepared = await prepare_items(processor.items, prompts)

        def process() -> list[ProcessedRequest]:
            return processor.process_batch(
                ids,
                prompts,
                params,
                priorities=[priority] * len(ids),
                arrival_time=arrived,
                lora_requests=[lora_request] * len(ids),
                items=prepared.items or [()] * len(ids),  # none, so that they are not prepared in this thread
            )

        with prepared:
            self._require_ready()
            if prepared.items is None and total_cost(prompts, params) <= 1.0:
                requests = process()
            else:
                with self._admission.tokenizing(len(prompts)):
                    requests = await self._run_in_thread(process, num_text_chars(prompts))
                self._require_ready()  # the state may have changed while a thread tokenized
            adapters = self._lora_validator
            if lora_request is not None and not adapters.is_loaded(adapters.validate(lora_request)):
                await self.add_lora(lora_request)
                self._require_ready()
            self._admission.check_capacity(
                sum(r.params.num_sequences for r in requests), sum(len(r.core.prompt_token_ids) for r in requests)
            )
            return [self._start_request(request) for request in prepared.with_leases(requests)]

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Aborts requests by id, in any state. Their callers get the outputs so far, with `finish_reason` "abort".
        Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self._abort(self._output_processor.find_requests(ids))

    async def abort_all(self) -> None:
        """Aborts every request, like `abort`."""
        self._abort_all()

    async def wait_for_requests_to_drain(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for all requests to finish. Returns whether they have."""
        deadline = time.monotonic() + timeout
        while self.num_requests and self._fatal_error is None and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return not self.num_requests

    # --- text

    async def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer.

        Raises:
            ConfigError: The engine was started with `skip_tokenizer_init`.
        """
        return self.tokenizer.hf

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. A long text is tokenized in a thread.

        Raises:
            RequestError: `text` is not valid Unicode, or the tokenizer rejects it.
        """
        self.input_processor.check_text("")  # raises if there is no tokenizer

        def encode() -> list[int]:
            return self.tokenizer.encode(self.input_processor.check_text(text), add_special_tokens=add_special_tokens)

        return encode() if tokenization_cost(text) <= 1.0 else await self._run_in_thread(encode, len(text))

    # --- images, audio, videos and embeddings

    expand_prompt = forward(_items, AsyncItems.expand_prompt)
    reset_mm_cache = forward(_items, AsyncItems.reset_mm_cache)
    item_placeholders = forward(_items, AsyncItems.item_placeholders)
    read_prompt_embeds = forward(_items, AsyncItems.read_prompt_embeds)

    # --- state

    @property
    def state(self) -> str:
        """`ready`, `asleep`, `stopped by an error` or `closed`."""
        if self._is_closed:
            return "closed"
        return "stopped by an error" if self.errored else "asleep" if self.sleep_mode.is_asleep else "ready"

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests: it is neither dead nor shut down."""
        return not self._is_closed and not self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that ended the engine, or None."""
        if self._fatal_error is None and not self._is_closed:
            self._fatal_error = self._client.failure  # the loop may not have run since the failure
        return self._fatal_error

    @property
    def heartbeat_age(self) -> float:
        """Seconds since an engine core with unfinished work last reported.

        0 while it is idle, and during `sleep`, `wake_up` and weight updates, which may take long. No message is sent.
        """
        return 0.0 if self.sleep_mode.is_changing or self.rollouts.num_long_calls else self._client.heartbeat_age

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's last reported state, summed over all replicas."""
        return self._client.stats

    @property
    def all_metrics(self) -> EngineMetrics:
        """`metrics` plus those of the other front ends of the same engine."""
        others = list(self._other_metrics())
        return self.metrics.merged_with(others) if others else self.metrics

    @property
    def load(self) -> EngineLoad:
        """The current load of the engine."""
        stats = self.stats
        self._update_rates(stats)
        return EngineLoad(
            num_requests=self._output_processor.num_requests,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            prompt_tokens_per_second=self._prompt_rate.per_second(),
            generation_tokens_per_second=self._generation_rate.per_second(),
            heartbeat_age=self.heartbeat_age,
        )

    @property
    def num_requests(self) -> int:
        """Unfinished requests of this front end."""
        return self._output_processor.num_requests

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits in the engine cores, by their last report, and no long call runs."""
        is_busy = (
            self.stats.num_running
            or self.stats.num_waiting
            or self.rollouts.num_long_calls
            or self.sleep_mode.is_changing
        )
        return not is_busy

    def describe_cores(self) -> list[str]:
        """What each engine core is doing, with the stacks of its threads if this process has started it. Blocks for up
        to half a second each; callable in any thread."""
        return self._client.describe_cores()

    @property
    def core_pids(self) -> list[int]:
        """The process ids of the engine cores."""
        return self._client.core_pids

    # --- administration

    async def check_health(self) -> None:
        """Returns if the engine core and every worker answer, after the current step.

        Raises:
            EngineDeadError: The engine has stopped.
        """
        self._require_alive()
        await self._client.call(CheckHealth())

    async def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache. Returns False if running requests use some of its blocks."""
        self._require_alive()
        return await self._client.call(ResetPrefixCache())

    async def call_model(self, method: str, args: Sequence[Any] = ()) -> Any:
        """Calls one of the methods that the model's class offers, see `LLMEngine.call_model`."""
        self._require_alive()
        return await self._client.call(CallModel(method, list(args)))

    add_lora = forward(_adapters, AsyncAdapters.add_lora)
    remove_lora = forward(_adapters, AsyncAdapters.remove_lora)
    list_loras = forward(_adapters, AsyncAdapters.list_loras)
    update_lora = forward(_adapters, AsyncAdapters.update_lora)

    pause_generation = forward(_rollouts, AsyncRollouts.pause_generation)
    resume_generation = forward(_rollouts, AsyncRollouts.resume_generation)
    is_paused = is_scheduler_paused = forward(_rollouts, AsyncRollouts.is_paused)
    init_weight_transfer_engine = forward(_rollouts, AsyncRollouts.init_weight_transfer_engine)
    start_weight_update = forward(_rollouts, AsyncRollouts.start_weight_update)
    update_weights = forward(_rollouts, AsyncRollouts.update_weights)
    finish_weight_update = forward(_rollouts, AsyncRollouts.finish_weight_update)
    abandon_weight_update = forward(_rollouts, AsyncRollouts.abandon_weight_update)
    weight_info = forward(_rollouts, AsyncRollouts.weight_info)
    collective_rpc = forward(_rollouts, AsyncRollouts.collective_rpc)

    sleep = forward(_sleep_mode, AsyncSleep.sleep)
    wake_up = forward(_sleep_mode, AsyncSleep.wake_up)
    is_sleeping = forward(_sleep_mode, AsyncSleep.is_sleeping)

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps, as a property."""
        return self.sleep_mode.is_asleep

    def shutdown(self) -> None:
        """Ends the engine and frees its memory. Callers that await an output get an EngineDeadError. Idempotent.

        Blocks for up to a few seconds. Call it in the loop's thread, or after the loop has ended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._stats_log is not None:
            self._stats_log.close()
        self._fail_requests(EngineDeadError("The engine has been shut down."))
        try:
            self._client.shutdown()
        finally:
            # Queued work raises an error. Callers would mistake a cancellation for their own.
            self._threads.shutdown()
            self._close_frontend()

    # --- internals

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("The engine has been shut down; create a new one.")

    def _require_alive(self) -> None:
        self._require_open()
        if (dead := self.dead_error) is not None:
            raise EngineDeadError(str(dead)) from dead
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._client.attach(loop, self._handle_outputs, self._handle_core_death, self.sleep_mode.follow)
        elif self._loop is not loop:
            raise RuntimeError(
                "This AsyncLLM was first used in another event loop, and only that loop receives its outputs. "
                "Use one loop (each asyncio.run creates a new one), or create one engine per loop."
            )

    def _require_ready(self) -> None:
        self._require_alive()
        self.sleep_mode.require_awake()

    def _start_request(self, request: ProcessedRequest) -> RequestOutputStream:
        self._startup_timer.record_first_request()
        state, children = self._output_processor.add_request(request)
        ends = self._remove_request, self._finish_undecodable
        state.stream = stream = RequestOutputStream(state, *ends, self._output_validator)
        if self.tracer is not None:
            self.tracer.start_request(state)
        self._client.add_requests(children)
        if self._stats_log is not None:
            self._stats_log.schedule()
        return stream

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Processes the outputs of one engine step."""
        num_new = 0
        if outputs.outputs:
            processed = self._output_processor.process_outputs(outputs)
            self._apply(processed)
            num_new = processed.num_new_tokens
        if num_new:
            self._startup_timer.record_first_token()
        if outputs.stats is not None:
            self._update_rates(outputs.stats)
            self._stat_loggers.record(outputs.stats, num_new)
            if self._stats_log is not None and outputs.stats.num_running:
                self._stats_log.schedule()  # also for requests of other front ends

    def _apply(self, processed: OutputProcessorOutput) -> None:
        """Sends the resulting aborts and requests to the engine core, and records metrics and spans."""
        if self._fatal_error is None and not self._is_closed:
            self._client.abort_requests(processed.requests_to_abort)
            for children in processed.requests_to_add:
                self._client.add_requests(children)
        self.metrics.record(processed)
        if self.tracer is not None:
            for request in processed.finished:
                self.tracer.finish_request(request)

    def _abort(self, requests: Iterable[RequestState]) -> None:
        """Ends requests with the outputs so far."""
        self._apply(self._output_processor.finish_requests(requests))

    def _abort_all(self) -> None:
        self._abort(self._output_processor.requests)

    def _remove_request(self, request: RequestState) -> None:
        """Ends a request whose stream was closed."""
        self._apply(self._output_processor.remove_requests([request]))

    def _finish_undecodable(self, request: RequestState) -> None:
        """Ends sequences whose tokens cannot be turned into text."""
        processed = OutputProcessorOutput()
        self._output_processor.finish_undecodable(request, processed)
        self._apply(processed)

    def _fail_requests(self, error: EngineDeadError) -> None:
        """Ends all requests with an error."""
        for request in self._output_processor.remove_requests(self._output_processor.requests).finished:
            if self.tracer is not None:
                self.tracer.finish_request(request, error)
            if request.stream is not None:
                request.stream.fail(error)

    def _update_rates(self, stats: SchedulerStats) -> None:
        """From the core's counters: the outputs of a request that is not streamed all arrive at its end."""
        self._prompt_rate.update_total(stats.num_prompt_tokens)
        self._generation_rate.update_total(stats.num_generated_tokens)

    def _handle_core_death(self, error: EngineDeadError) -> None:
        if self._fatal_error is None and not self._is_closed:
            self._fatal_error = error
            logger.error("The engine has died: %s", str(error).partition("\n")[0])
        self._fail_requests(error)

    async def _run_in_thread(self, work: Callable[[], _T], num_chars: int = 0) -> _T:
        def work_unless_closed() -> _T:
            self._require_open()
            return work()

        self._require_open()
        return await self._threads.run(work_unless_closed, num_chars)
