"""LLMEngine: the synchronous engine. `add_request` queues requests; each `step()` returns their new outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig
from mvllm.engine.adapters import EngineAdapters
from mvllm.engine.forward import forward
from mvllm.engine.frontend.engine_frontend import EngineFrontend
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.metrics.stats import EngineLoad, EngineMetrics
from mvllm.engine.process.engine_core_client import EngineCoreClient
from mvllm.engine.process.inproc_client import make_client
from mvllm.engine.rollouts import EngineRollouts
from mvllm.engine.shared_steps import SharedSteps, StepCaller, exclusive
from mvllm.engine.sleep import EngineSleep
from mvllm.errors import EngineDeadError, MvllmError, RequestError
from mvllm.messages.commands import (
    CallModel,
    IsSchedulerPaused,
    ResetEncoderCache,
    ResetPrefixCache,
)
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import SchedulerStats
from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.worker_protocol import WORKER_METHODS

if TYPE_CHECKING:
    from mvllm.engine.metrics.reader import Metric

_T = TypeVar("_T")


def _rollouts(engine: LLMEngine) -> EngineRollouts:
    return engine.rollouts


def _adapters(engine: LLMEngine) -> EngineAdapters:
    return engine.adapters


def _sleep_mode(engine: LLMEngine) -> EngineSleep:
    return engine.sleep_mode


class LLMEngine(EngineFrontend[EngineCoreClient]):
    """An engine that runs one step per call of `step()`.

    Thread-safe: its methods run one after another, in the order of the calls. Outputs that `step` returns go to the
    thread that called it. Threads that share steps, each with its own outputs, use `add_caller` and `next_outputs`, as
    LLM does; `step` returns the outputs of all other requests.

    Args:
        config: The requested configuration. The platform may change it; the attribute `config` is the one in use.
        client: An engine core to use instead of a new one.

    Attributes:
        config: The configuration in use.
        input_processor, pooling_input_processor: The validators of requests.
        num_generated_tokens: Tokens generated since the start.
        metrics: Counters and histograms since the start.
        rollouts: Pauses the engine and changes its weights.
        adapters: Loads, unloads and replaces LoRA adapters.
        sleep_mode: Puts the engine to sleep and wakes it up.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started. No process or memory is left behind.
    """

    def __init__(self, config: EngineConfig, client: EngineCoreClient | None = None) -> None:
        super().__init__(config, make_client, client)
        self._closed = False
        self._fatal_error: BaseException | None = None
        self._stats: SchedulerStats | None = None
        self._shared_steps = SharedSteps(self._drive_step, self._has_work, self.wake)
        self.rollouts = EngineRollouts(self._client, self._shared_steps, self._require_alive)
        self.adapters = EngineAdapters(self._client, self._shared_steps, self._lora_validator, self._require_alive)
        self.sleep_mode = EngineSleep(self._client, self._shared_steps, self._fail_all_requests, self._require_alive)
        self._unread_outputs: deque[list[RequestOutput]] = deque()  # of steps that callers ran; for `step`
        self._validations: dict[str, list[Callable[[], None]]] = {}  # by request id: what waits for them
        self.num_generated_tokens = 0

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Builds an engine from `EngineArgs`. It loads the model."""
        return cls(requested_config(args))

    # --- properties

    @property
    def state(self) -> str:
        """`ready`, `asleep`, `stopped by an error` or `closed`."""
        if self._closed:
            return "closed"
        return "stopped by an error" if self._fatal_error else "asleep" if self.sleep_mode.is_asleep else "ready"

    @property
    def stats(self) -> SchedulerStats | None:
        """The scheduler's state after the last step that reported it."""
        return self._stats

    @property
    def all_metrics(self) -> EngineMetrics:
        """Counters and histograms since the start."""
        return self.metrics

    @property
    def load(self) -> EngineLoad:
        """The load after the last step. Rates and the age of the heartbeat, which are for servers, are 0."""
        stats = self._stats or SchedulerStats()
        return EngineLoad(
            num_requests=self._output_processor.num_requests,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            prompt_tokens_per_second=0.0,
            generation_tokens_per_second=0.0,
            heartbeat_age=0.0,
        )

    @exclusive
    def read_metrics(self) -> list[Metric]:
        """The metrics since the start, see `mvllm.engine.metrics.reader`."""
        from mvllm.engine.metrics.reader import read_metrics  # imports prometheus-client

        return read_metrics(self)

    def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer.

        Raises:
            ConfigError: The engine was started with `skip_tokenizer_init`.
        """
        return self.tokenizer.hf

    # --- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Validates a request and queues it.

        Args:
            request_id: Unique among the unfinished requests.
            params: Sampling parameters; None for the model's defaults.
            priority: Lower values are scheduled first; without effect unless the policy is `priority`.
            arrival_time: Monotonic seconds; now by default.
            lora_request: The LoRA adapter to apply; it is loaded if necessary.

        Raises:
            RequestError: The request is invalid; nothing was queued.
            EngineDeadError: The engine has stopped.
        """
        self._require_alive()
        processed = self.input_processor.process(
            request_id, prompt, params, priority=priority, arrival_time=arrival_time, lora_request=lora_request
        )
        self.add_processed_requests([processed])

    @exclusive
    def add_processed_requests(self, requests: Sequence[ProcessedRequest]) -> None:
        """Queues requests that an input processor has returned. If one id is in use, none is queued."""
        self._require_alive()
        self.sleep_mode.require_awake()
        self.adapters.load_for(requests)
        self._startup_timer.record_first_request()
        new_ids: set[str] = set()
        for request in requests:
            request_id = request.core.request_id
            if request_id in new_ids or self._output_processor.find_requests([request_id]):
                raise RequestError(
                    f"The request id {request_id[:80]!r} is in use by an unfinished request. Choose another.",
                    parameter="request_id",
                )
            new_ids.add(request_id)
        try:
            for request in requests:
                _, children = self._output_processor.add_request(request)
                for child in children:
                    self._client.add_request(child)
        except BaseException:
            self.abort_request(new_ids)
            raise

    @exclusive
    def add_caller(self, requests: Sequence[ProcessedRequest]) -> StepCaller:
        """As `add_processed_requests`, for a call that waits for the outputs with `next_outputs`. The call ends with
        `remove_caller`."""
        self.add_processed_requests(requests)
        return self._shared_steps.add([request.core.request_id for request in requests])

    def next_outputs(self, caller: StepCaller, before_step: Callable[[], None]) -> list[RequestOutput]:
        """Runs steps until there are outputs of a caller's requests, or sleeps while another caller runs them.

        See `SharedSteps.next_outputs`. The requests of all callers run in the same steps.
        """
        return self._finish_validations(self._shared_steps.next_outputs(caller, before_step))

    @exclusive
    def remove_caller(self, caller: StepCaller) -> None:
        """Ends a call, and aborts its unfinished requests. Other callers continue."""
        self._shared_steps.remove(caller)
        self.abort_request(caller.unfinished)
        for output in caller.outputs:
            self._validations.pop(output.request_id, None)

    @property
    def is_driven(self) -> bool:
        """Whether a call in another thread runs steps, or waits for work."""
        return self._shared_steps.is_driven

    @exclusive
    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Aborts requests in any state, without further outputs. Unknown ids are ignored.

        A caller that waits for the outputs of one gets a RequestError.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._drop_requests(ids, RequestError("The request was aborted (abort_request)."))

    def _drop_requests(self, ids: Sequence[str], error: MvllmError) -> None:
        """Aborts requests. Their callers raise the error."""
        dropped = set(ids)
        removed = self._output_processor.remove_requests(self._output_processor.find_requests(ids))
        self._shared_steps.fail(ids, error)
        kept = ([output for output in outputs if output.request_id not in dropped] for outputs in self._unread_outputs)
        self._unread_outputs = deque(filter(None, kept))
        for request_id in ids:
            self._validations.pop(request_id, None)
        if removed.requests_to_abort and self._fatal_error is None and not self._closed:
            self._client.abort_requests(removed.requests_to_abort)

    def _fail_all_requests(self, error: MvllmError) -> None:
        self._drop_requests([request.request_id for request in self._output_processor.requests], error)

    def has_unfinished_requests(self) -> bool:
        """Whether there are unfinished requests."""
        return self._output_processor.num_requests > 0 or bool(self._unread_outputs)

    def step(self) -> list[RequestOutput]:
        """Runs one step of the engine.

        Returns:
            The new outputs, at most one per request; without those of `add_caller`, whose callers get them. If callers
            have run steps since, those of the oldest such step, and no step runs.

        Raises:
            EngineDeadError: The engine failed in this or an earlier step; `__cause__` is the original error.
        """
        return self._finish_validations(self._next_step())

    @exclusive
    def _next_step(self) -> list[RequestOutput]:
        self._require_alive()
        if self._unread_outputs:
            return self._unread_outputs.popleft()
        return self._shared_steps.deliver(self._run_step())

    def _finish_validations(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Waits until outputs have their warnings. Without the lock: other threads run steps meanwhile."""
        if self._validations:
            for output in outputs:
                for finish in self._validations.pop(output.request_id, ()):
                    finish()
        return outputs

    def _drive_step(self) -> None:
        """A step that a caller runs."""
        if others := self._shared_steps.deliver(self._run_step()):
            self._unread_outputs.append(others)

    def _has_work(self) -> bool:
        self._require_alive()
        if self._client.has_requests():
            return True
        self._client.call(IsSchedulerPaused())  # raises if the engine core has died
        return False

    def _run_step(self) -> list[RequestOutput]:
        try:
            return self._step()
        except BaseException as e:  # an interrupt, too, leaves the step incomplete
            self._fatal_error = e
            if isinstance(e, EngineDeadError) or not isinstance(e, Exception):
                raise
            raise EngineDeadError(f"The engine stopped: {type(e).__name__}: {e}. Create a new engine.") from e

    def _step(self) -> list[RequestOutput]:
        core_outputs = self._client.step()
        if core_outputs.outputs:
            self._startup_timer.record_first_token()
        if core_outputs.stats is not None:
            self._stats = core_outputs.stats
        processed = self._output_processor.process_outputs(core_outputs)
        if processed.requests_to_abort:
            self._client.abort_requests(processed.requests_to_abort)
        for children in processed.requests_to_add:
            for child in children:
                self._client.add_request(child)
        self.num_generated_tokens += processed.num_new_tokens
        self.metrics.record(processed)
        for request_id, texts in processed.texts_to_validate.items():
            self._validations.setdefault(request_id, []).append(self._output_validator.start(texts))
        if core_outputs.stats is not None:
            self._stat_loggers.record(core_outputs.stats, processed.num_new_tokens)
        return processed.request_outputs

    def wake(self) -> None:
        """Makes a `step` that waits for the engine core's process return early. Callable in any thread or a signal
        handler."""
        if not self._closed:
            self._client.interrupt_step()

    # --- rollouts

    pause_generation = forward(_rollouts, EngineRollouts.pause_generation)
    resume_generation = forward(_rollouts, EngineRollouts.resume_generation)
    is_paused = is_scheduler_paused = forward(_rollouts, EngineRollouts.is_paused)
    require_not_paused = forward(_rollouts, EngineRollouts.require_not_paused)
    init_weight_transfer_engine = forward(_rollouts, EngineRollouts.init_weight_transfer_engine)
    start_weight_update = forward(_rollouts, EngineRollouts.start_weight_update)
    update_weights = forward(_rollouts, EngineRollouts.update_weights)
    finish_weight_update = forward(_rollouts, EngineRollouts.finish_weight_update)
    abandon_weight_update = forward(_rollouts, EngineRollouts.abandon_weight_update)
    weight_info = forward(_rollouts, EngineRollouts.weight_info)
    call_workers = forward(_rollouts, EngineRollouts.call_workers)

    # --- adapters and sleep

    add_lora = forward(_adapters, EngineAdapters.add_lora)
    remove_lora = forward(_adapters, EngineAdapters.remove_lora)
    list_loras = forward(_adapters, EngineAdapters.list_loras)
    update_lora = forward(_adapters, EngineAdapters.update_lora)

    sleep = forward(_sleep_mode, EngineSleep.sleep)
    wake_up = forward(_sleep_mode, EngineSleep.wake_up)

    # --- administration

    @exclusive
    def call_model(self, method: str, args: Sequence[Any] = ()) -> Any:
        """Calls one of the methods that the model's class offers (`CausalLM.remote_methods`), between two steps.

        Args:
            args: Numbers, texts, bytes, lists and dicts, as is the result.

        Raises:
            RequestError: The model has no such method, or an argument is not valid.
            EngineSleepingError: The weights sleep.
        """
        self._require_alive()
        return self._client.call(CallModel(method, list(args)))

    @exclusive
    def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache. Returns False if running requests use some of its blocks."""
        self._require_alive()
        return self._client.call(ResetPrefixCache())

    @exclusive
    def reset_mm_cache(self) -> bool:
        """Drops prepared items of this front end, and the encoder cache. The prefix cache stays.

        Returns:
            False if running requests use some results of encoders, which are kept.
        """
        self._require_alive()
        self.item_client.cache.clear()
        return self._client.call(ResetEncoderCache())

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine is in sleep mode (see `sleep`)."""
        return self.sleep_mode.is_asleep

    @property
    def is_asleep(self) -> bool:
        """As `is_sleeping`, under the name that AsyncLLM has."""
        return self.sleep_mode.is_asleep

    @exclusive
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        timeout: float | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker.

        Args:
            method: A method of WorkerProtocol, or of the class `worker_extension_cls`.
            args: Its arguments.
            kwargs: Keyword arguments of a method of `worker_extension_cls`.
            timeout: Seconds to wait for worker processes; None for the executor's limit.

        Returns:
            The results in rank order.

        Raises:
            ConfigError: There is no such method, or the engine core is another process.
        """
        self._require_alive()
        if method not in WORKER_METHODS:
            return self.call_workers(method, args, kwargs)
        return self._client.collective_rpc(method, args, timeout)

    @exclusive
    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker; returns the results in rank order.

        Raises:
            ConfigError: A worker runs in another process, which the function cannot be sent to.
        """
        self._require_alive()
        return self._client.apply_model(function)

    def shutdown(self) -> None:
        """Ends the engine and frees its memory, after the step that runs. Callers that wait for outputs get an
        EngineDeadError. Idempotent."""
        self.wake()  # another thread may wait for the engine core's process
        self._shutdown()

    @exclusive
    def _shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._client.shutdown()
            finally:
                self._close_frontend()

    def _require_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("The engine has been shut down; create a new one.")
        if self._fatal_error is not None:
            reason = str(self._fatal_error) or type(self._fatal_error).__name__
            raise EngineDeadError(f"The engine is dead; create a new one. Cause: {reason}") from self._fatal_error
