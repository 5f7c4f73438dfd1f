"""Offline benchmarks of an engine in this process: throughput, and latency of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.engine import (
    LLMEngine,
    PromptType,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
    run_prompts,
)
from mvllm_bench.datasets import SampleRequest
from mvllm_bench.report import standard_percentiles


def measure_throughput(
    engine: LLMEngine,
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    on_done: Callable[[int], None] = lambda num_tokens: None,
) -> dict[str, Any]:
    """Adds all requests at once and measures the time until the last has finished.

    Args:
        samples: The requests.
        params: Sampling parameters of all requests; `max_tokens` comes from the samples.
        on_done: Called with the number of output tokens of each finished request.

    Raises:
        RequestError: A request is too long for the model. No request was run.
    """
    requests = [(_prompt(sample), _for_length(params, sample.output_len)) for sample in samples]
    num_input, num_output, seconds = _run(engine, requests, on_done)
    return {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "total_num_tokens": num_input + num_output,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(samples) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
    }


def measure_latency(
    engine: LLMEngine,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    params: SamplingParams,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measures the latency of batches of random prompts, which share no prefix.

    Raises:
        ConfigError: A number is too small.
        RequestError: The lengths exceed the model's.
    """
    import numpy as np

    for name, value in (("batch_size", batch_size), ("num_iters", num_iters), ("input_len", input_len)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    random = np.random.default_rng(seed)
    vocab_size = engine.model_config.vocab_size
    params = _for_length(params, output_len)
    latencies = []
    for i in range(num_iters_warmup + num_iters):
        batch = random.integers(0, vocab_size, (batch_size, input_len)).tolist()
        requests: list[tuple[PromptType, SamplingParams]] = [
            (TokensPrompt(prompt_token_ids=ids), params) for ids in batch
        ]
        seconds = _run(engine, requests)[2]
        if i >= num_iters_warmup:
            latencies.append(seconds)
        on_done()
    average = sum(latencies) / len(latencies)
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": standard_percentiles(latencies),
        "output_tokens_per_second": batch_size * output_len / average,
    }


def _for_length(params: SamplingParams, length: int) -> SamplingParams:
    """A copy of the parameters for outputs of `length` tokens, reported when they are complete."""
    import msgspec

    return msgspec.structs.replace(params, max_tokens=length, output_kind=RequestOutputKind.FINAL_ONLY)


def _prompt(sample: SampleRequest) -> PromptType:
    return sample.prompt if sample.token_ids is None else TokensPrompt(prompt_token_ids=list(sample.token_ids))


def _run(
    engine: LLMEngine,
    requests: Sequence[tuple[PromptType, SamplingParams]],
    on_done: Callable[[int], None] = lambda num_tokens: None,
) -> tuple[int, int, float]:
    """Number of prompt tokens, of output tokens, and seconds from adding the requests to the last output."""
    start = time.perf_counter()
    num_input = num_output = 0
    with closing(run_prompts(engine, requests)) as steps:
        for output in steps:
            if not output.finished:
                continue
            error = next((sequence.error for sequence in output.outputs if sequence.error), None)
            if error is not None:
                raise MvllmError(f"A request of the benchmark failed: {error}")
            num_input += len(output.prompt_token_ids)
            num_new = sum(len(sequence.token_ids) for sequence in output.outputs)
            num_output += num_new
            on_done(num_new)
    return num_input, num_output, time.perf_counter() - start
