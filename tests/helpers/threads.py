"""Runs functions in a thread each, and requests of one LLM split over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mvllm import LLM, RequestOutput, SamplingParams

SECONDS = 120


def run_in_threads(*work: Callable[[], Any]) -> list[Any]:
    """The results, or the exceptions, of functions that run in a thread each."""

    def caught(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as e:
            return e

    threads = ThreadPoolExecutor(len(work))
    futures = [threads.submit(caught, function) for function in work]
    threads.shutdown(wait=False)
    return [future.result(SECONDS) for future in futures]


def generate_in_threads(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], num_threads: int
) -> list[RequestOutput]:
    """The outputs of prompts that threads share: each generates from every `num_threads`-th."""

    def generate(first: int) -> list[RequestOutput]:
        ids = [{"prompt_token_ids": prompt} for prompt in prompts[first::num_threads]]
        return llm.generate(ids, params[first::num_threads], use_tqdm=False, raise_on_error=False)

    parts = run_in_threads(*(lambda i=i: generate(i) for i in range(num_threads)))
    for part in parts:
        if isinstance(part, BaseException):
            raise part
    return [parts[i % num_threads][i // num_threads] for i in range(len(prompts))]
