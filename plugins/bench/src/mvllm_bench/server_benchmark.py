"""Runs a benchmark against a server: sends requests at given times with limited concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvllm.extension_api import ConfigError
from mvllm_bench.arrivals import request_arrival_times
from mvllm_bench.client import BenchmarkClient, ServerEndpoint
from mvllm_bench.datasets import BenchmarkTokenizer, SampleRequest
from mvllm_bench.metrics import RequestResult

_READY_PAUSE = 0.5

DEFAULT_MAX_CONCURRENCY = 1024
"""Concurrency when all requests are sent at once: what a server queues by default (`--max-queued-requests`)."""


@dataclass(frozen=True)
class LoadPattern:
    """How requests are sent.

    Attributes:
        request_rate: Requests per second; infinite for all at once.
        burstiness: 1 for a Poisson process; less gives bursts, more gives even gaps.
        max_concurrency: Limit of concurrent requests; None for no limit.
        num_warmups: Requests that are sent first and not measured.
        seed: Seed of the arrival times.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0


@dataclass(frozen=True)
class BenchmarkRun:
    """The result of a run.

    Attributes:
        results: The results of all requests, in the order of sending.
        duration: Seconds from the start to the last response.
    """

    results: list[RequestResult]
    duration: float


async def get_first_model(target: ServerEndpoint) -> str:
    """The first model that a server lists."""
    async with BenchmarkClient(target) as client:
        return await client.first_model()


async def run_benchmark(
    target: ServerEndpoint,
    samples: Sequence[SampleRequest],
    load: LoadPattern,
    *,
    tokenizer: BenchmarkTokenizer | None = None,
    ready_timeout: float = 0.0,
    on_done: Callable[[RequestResult], None] = lambda result: None,
) -> BenchmarkRun:
    """Sends every request at its time and waits for all responses.

    Args:
        target: The server.
        samples: The requests.
        load: How they are sent.
        tokenizer: Counts tokens if the server does not.
        ready_timeout: Seconds to wait for the response to a first request, which is not measured; 0 sends none.
        on_done: Called with each completed result.

    Raises:
        ConfigError: The first request failed, or `load` is invalid.
    """
    if load.max_concurrency is not None and load.max_concurrency < 1:
        raise ConfigError(f"The maximum concurrency is {load.max_concurrency}; it must be at least 1.")
    times = request_arrival_times(len(samples), load.request_rate, load.burstiness, load.seed)
    limit = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()

    async with BenchmarkClient(target) as client:
        if ready_timeout > 0:
            await _wait_ready(client, target, samples[0], ready_timeout)

        async def send(sample: SampleRequest) -> RequestResult:
            async with limit:
                return await client.send(sample)

        await asyncio.gather(*(send(samples[i % len(samples)]) for i in range(load.num_warmups)))

        async def measure(sample: SampleRequest) -> RequestResult:
            result = await send(sample)
            _fill_in_token_counts(result, sample, tokenizer)
            on_done(result)
            return result

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for sample, moment in zip(samples, times, strict=True):
                delay = start + moment - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(group.create_task(measure(sample)))
        return BenchmarkRun([task.result() for task in tasks], time.perf_counter() - start)


async def _wait_ready(client: BenchmarkClient, target: ServerEndpoint, sample: SampleRequest, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = await client.send(sample)
        if result.success:
            return
        if time.monotonic() + _READY_PAUSE >= deadline:
            raise ConfigError(
                f"{target.url} did not complete a first request within {seconds:g} s: {result.error}. "
                "Check --base-url, --endpoint-type and --model."
            )
        await asyncio.sleep(_READY_PAUSE)


def _fill_in_token_counts(result: RequestResult, sample: SampleRequest, tokenizer: BenchmarkTokenizer | None) -> None:
    """Fills in token counts that the server did not send. Without a tokenizer each chunk counts as one token."""
    if result.prompt_tokens is None:
        result.prompt_tokens = sample.prompt_len
    if result.output_tokens is None and result.success:
        if tokenizer is not None:
            result.output_tokens = len(tokenizer.encode(result.text))
        else:
            result.output_tokens = len(result.itl) + 1
