"""Runs the requests of one call of `LLM` to their end, with a progress bar: finished prompts, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.llm_engine import LLMEngine
from mvllm.entrypoints.step_loop import run_requests
from mvllm.errors import RequestError
from mvllm.progress import progress_class


def finished_outputs(
    engine: LLMEngine,
    requests: Sequence[ProcessedRequest],
    use_tqdm: bool | Callable[..., Any],
    raise_on_error: bool = False,
) -> list[RequestOutput]:
    """Adds the requests to the engine and steps it until all have finished; returns their outputs in order.

    With `raise_on_error` the first request that fails ends the call: the others are aborted.
    """
    engine.rollouts.require_not_paused()
    ids = [request.core.request_id for request in requests]
    outputs: dict[str, RequestOutput] = {}
    with _Progress(len(ids), use_tqdm) as progress, closing(run_requests(engine, requests)) as steps:
        for output in steps:
            if output.finished:
                if raise_on_error:
                    _raise_failure(output, ids)
                outputs[output.request_id] = output
                progress.update(output)
    return [outputs[i] for i in ids]


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


def _raise_failure(output: RequestOutput, request_ids: Sequence[str]) -> None:
    """Raises the error of a finished request, if one of its sequences has one.

    Args:
        request_ids: Those of all requests of the call, in the order of their prompts.

    Raises:
        RequestError: A sequence has the finish reason `error`.
    """
    for sequence in output.outputs:
        if sequence.finish_reason == "error":
            count = len(request_ids)
            where = f"Prompt {request_ids.index(output.request_id)} of {count}: " if count > 1 else ""
            raise RequestError(f"{where}{sequence.error}", parameter=sequence.error_parameter)
