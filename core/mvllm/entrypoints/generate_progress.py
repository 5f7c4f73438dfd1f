"""The progress bar of `LLM.generate`: finished prompts, and input and output tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.progress import progress_class


class GenerateProgress:
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

    def __enter__(self) -> GenerateProgress:
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
