"""The requests that callers of an AsyncLLM wait for: whether one more fits, what a step brought each, how each ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.frontend.beam_search import BeamSearch
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.output_processor import OutputProcessor, ProcessedStep, RequestState
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds, fan_out
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.engine.metrics.stats import EngineMetrics
from mvllm.engine.metrics.tracing import Tracer
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.errors import EngineDeadError, QueueFullError
from mvllm.messages.requests import EngineCoreOutputs


class InFlightRequests:
    """One stream for each request, from when it is queued until it has ended. Used from one event loop.

    Args:
        config: The configuration the engine runs with.
        client: The engine core.
        output_processor: Keeps what each request has been given.
        core_ids: Names sequences in the engine core.
        metrics: Where refused and ended requests are counted.
        is_core_usable: Whether the engine core can still be told of something.

    Attributes:
        tracer: Writes spans of requests, if one is set.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: AsyncEngineCoreClient,
        output_processor: OutputProcessor,
        core_ids: CoreRequestIds,
        metrics: EngineMetrics,
        is_core_usable: Callable[[], bool],
    ) -> None:
        self._config = config
        self._client = client
        self._output_processor = output_processor
        self._core_ids = core_ids
        self._metrics = metrics
        self._is_core_usable = is_core_usable
        self._streams: dict[RequestState, RequestOutputStream] = {}
        self._by_id: dict[str, list[RequestState]] = {}
        self._num_sequences = 0
        self._num_prompt_tokens = 0
        self._num_preparing = 0
        self.tracer: Tracer | None = None

    def __len__(self) -> int:
        """How many callers wait for."""
        return len(self._streams)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, the tokens of their prompts, and prompts that wait for a tokenizer's thread."""
        return self._num_sequences, self._num_prompt_tokens, self._num_preparing

    # --- the way in

    @contextlib.contextmanager
    def preparing(self, num_prompts: int) -> Iterator[None]:
        """Counts prompts that wait for a tokenizer's thread: a queue like any other."""
        self._num_preparing += num_prompts
        try:
            yield
        finally:
            self._num_preparing -= num_prompts

    def check_capacity(self, num_sequences: int, num_tokens: int) -> None:
        """Refuses what would make the queue longer than allowed. Whatever comes to an engine at rest is taken.

        Raises:
            QueueFullError: It would, and says by when it may be worth another try.
        """
        scheduler = self._config.scheduler
        num_under_way = self._num_sequences + self._num_preparing + self._client.num_other_sequences
        if not num_under_way:
            return
        can_run = scheduler.max_num_seqs * self._config.parallel.data_parallel_size
        if num_under_way + num_sequences > can_run + scheduler.max_queued_requests:
            reason = (
                f"{num_under_way} sequences are under way, of which {can_run} can run at once and "
                f"{scheduler.max_queued_requests} may wait (max_queued_requests)"
            )
        elif self._num_prompt_tokens + num_tokens > (scheduler.max_queued_tokens or math.inf):
            reason = (
                f"The prompts under way have {self._num_prompt_tokens} tokens; with the {num_tokens} of this request "
                f"they would have more than {scheduler.max_queued_tokens} (max_queued_tokens)"
            )
        else:
            return
        self._metrics.refused += 1
        raise QueueFullError(f"{reason}. Try again later.", retry_after=self._retry_after())

    def _retry_after(self) -> float:
        """Seconds: about what a request has taken so far, at least one and at most a minute."""
        latency = self._metrics.e2e_latency
        count = sum(latency.counts)
        return min(60.0, max(1.0, latency.sum / count)) if count else 1.0

    def add_request(self, request: ProcessedRequest) -> RequestOutputStream:
        """Queues a request in the engine core."""
        search = BeamSearch(request.core, self._core_ids) if request.params.use_beam_search else None
        children = fan_out(request.core, self._core_ids) if search is None else search.make_requests()
        state = self._output_processor.add_request(request, children, key=children[0].request_id, search=search)
        stream = RequestOutputStream(state, self._make_output, self._abort_abandoned)
        self._streams[state] = stream
        self._by_id.setdefault(state.request_id, []).append(state)
        self._num_sequences += state.num_sequences
        self._num_prompt_tokens += state.num_prompt_tokens
        if self.tracer is not None:
            self.tracer.start_request(state)
        self._client.add_requests(children)
        return stream

    # --- what comes of them

    def process_outputs(self, outputs: EngineCoreOutputs) -> int:
        """Hands out what a step brought; returns how many tokens are new."""
        taken = self._output_processor.apply_outputs(outputs)
        if taken.requests_to_abort:
            self._client.abort_requests(taken.requests_to_abort)
        for children in taken.requests_to_add:
            self._client.add_requests(children)
        self._notify_streams(taken)
        return taken.num_new_tokens

    def _notify_streams(self, taken: ProcessedStep) -> None:
        streams = self._streams
        for state in taken.requests:
            streams[state].notify()
        self._metrics.record(taken)
        for state in taken.finished:
            self._remove(state)

    def _make_output(self, state: RequestState) -> RequestOutput | None:
        """What a caller gets who has come for more."""
        output, broken = self._output_processor.make_request_output(state)
        if broken and state in self._streams:
            self._client.abort_requests(broken)
            if state.num_unfinished == 0:
                self._metrics.finish(state)
                self._remove(state)
        return output

    # --- the ways out

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends the requests of these ids with what they have; unknown ids are ignored."""
        self._abort([state for request_id in request_ids for state in self._by_id.get(request_id, ())])

    def abort_all(self) -> None:
        """Ends every request with what it has."""
        self._abort(list(self._streams))

    def fail_all(self, error: EngineDeadError) -> None:
        """Ends every request with an error."""
        for state, stream in list(self._streams.items()):
            self._output_processor.abort_requests([state.key])
            self._remove(state, error)
            stream.fail(error)

    def _abort(self, states: Sequence[RequestState]) -> None:
        taken, core_ids = self._output_processor.end_requests(states)
        self._client.abort_requests(core_ids)
        self._notify_streams(taken)

    def _abort_abandoned(self, state: RequestState) -> None:
        """Ends a request that nobody waits for any more."""
        if state not in self._streams:
            return  # it had ended
        core_ids = self._output_processor.abort_requests([state.key])
        if self._is_core_usable():
            self._client.abort_requests(core_ids)
        self._metrics.finish(state)
        self._remove(state)

    def _remove(self, state: RequestState, error: EngineDeadError | None = None) -> None:
        del self._streams[state]
        same_id = self._by_id[state.request_id]
        same_id.remove(state)
        if not same_id:
            del self._by_id[state.request_id]
        self._num_sequences -= state.num_sequences
        self._num_prompt_tokens -= state.num_prompt_tokens
        if self.tracer is not None:
            self.tracer.finish_request(state, error)
