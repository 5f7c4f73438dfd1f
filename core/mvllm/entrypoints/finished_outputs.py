"""Runs the requests of one call of `LLM` to their end, with a progress bar: finished prompts, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import Failure, RequestOutput, failure_of
from mvllm.engine.llm_engine import LLMEngine
from mvllm.entrypoints.step_loop import run_requests
from mvllm.errors import RequestFailedError
from mvllm.progress import progress_class


def finished_outputs(
    engine: LLMEngine,
    requests: Sequence[ProcessedRequest],
    use_tqdm: bool | Callable[..., Any],
    raise_on_error: bool = False,
) -> list[RequestOutput]:
    """Adds the requests to the engine and steps it until all have finished; returns their outputs in order.

    Raises:
        RequestFailedError: With `raise_on_error`, at the end: a request has failed.
    """
    engine.rollouts.require_not_paused()
    ids = [request.core.request_id for request in requests]
    outputs: dict[str, RequestOutput] = {}
    with _Progress(len(ids), use_tqdm) as progress, closing(run_requests(engine, requests)) as steps:
        for output in steps:
            if output.finished:
                outputs[output.request_id] = output
                progress.update(output)
    found = [outputs[i] for i in ids]
    if raise_on_error:
        raise_failures(found, map(failure_of, found))
    return found


class _Progress:
    """Counts finished prompts on a progress bar. A context manager that closes the bar.

    Args:
        total: Number of prompts.
        use_tqdm: False shows nothing; True shows a tqdm bar, or log lines without a terminal; a function is called in
            place of `tqdm.tqdm`.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else progress_class()
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._start = time.perf_counter()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, output: RequestOutput) -> None:
        """Counts a finished prompt."""
        if self._bar is None:
            return
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        input_rate, output_rate = self._num_prompt_tokens / seconds, self._num_output_tokens / seconds
        rates = f"input: {input_rate:,.1f} tokens/s, output: {output_rate:,.1f} tokens/s"
        if hasattr(self._bar, "set_postfix_str"):
            self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)


def raise_failures(outputs: Sequence[Any], failures: Iterable[Failure | None]) -> None:
    """Raises the first failure of a call.

    Args:
        outputs: What the call would return.
        failures: Of each prompt in order; None for one that has not failed.

    Raises:
        RequestFailedError: A prompt has failed. Of several prompts the message names the failed ones.
    """
    failed = [(at, failure) for at, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    at, (message, parameter) = failed[0]
    if len(outputs) > 1:
        more = f" {len(failed) - 1} more failed." if len(failed) > 1 else ""
        message = f"Prompt {at} of {len(outputs)}: {message}{more} The error's `outputs` has the outputs of all."
    raise RequestFailedError(message, parameter=parameter, outputs=outputs)
