"""Limits on the number of queued requests of an AsyncLLM (`max_queued_requests`, `max_queued_tokens`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.metrics.stats import EngineMetrics
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.errors import QueueFullError


class AdmissionControl:
    """Decides whether one more request may be queued. Used from one event loop.

    Args:
        config: The engine's configuration.
        output_processor: Counts the unfinished requests of this front end.
        client: Counts those of other front ends.
        metrics: Counts rejected requests.

    Attributes:
        num_tokenizing: Prompts that wait for a tokenizer thread. They count as queued.
    """

    def __init__(
        self,
        config: EngineConfig,
        output_processor: OutputProcessor,
        client: AsyncEngineCoreClient,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._output_processor = output_processor
        self._client = client
        self._metrics = metrics
        self.num_tokenizing = 0

    @contextlib.contextmanager
    def tokenizing(self, num_prompts: int) -> Iterator[None]:
        """Counts prompts as queued while they are tokenized in a thread."""
        self.num_tokenizing += num_prompts
        try:
            yield
        finally:
            self.num_tokenizing -= num_prompts

    def check_capacity(self, num_sequences: int, num_tokens: int) -> None:
        """Returns if requests of this size may be queued. An idle engine accepts every request.

        Raises:
            QueueFullError: They may not; `retry_after` is an estimate of when to try again.
        """
        scheduler = self._config.scheduler
        num_queued_tokens = self._output_processor.num_prompt_tokens
        num_queued = self._output_processor.num_sequences + self.num_tokenizing + self._client.num_other_sequences
        if not num_queued:
            return
        can_run = scheduler.max_num_seqs * self._config.parallel.data_parallel_size
        if num_queued + num_sequences > can_run + scheduler.max_queued_requests:
            reason = (
                f"{num_queued} sequences are running or queued; {can_run} can run at once and "
                f"{scheduler.max_queued_requests} may wait (max_queued_requests)"
            )
        elif num_queued_tokens + num_tokens > (scheduler.max_queued_tokens or math.inf):
            reason = (
                f"The prompts of unfinished requests have {num_queued_tokens} tokens; with the {num_tokens} of this "
                f"request they would have more than {scheduler.max_queued_tokens} (max_queued_tokens)"
            )
        else:
            return
        self._metrics.refused += 1
        raise QueueFullError(f"{reason}. Try again later.", retry_after=self._retry_after())

    def _retry_after(self) -> float:
        """The mean end-to-end latency in seconds, at least one second and at most a minute."""
        latency = self._metrics.e2e_latency
        count = sum(latency.counts)
        return min(60.0, max(1.0, latency.sum / count)) if count else 1.0
