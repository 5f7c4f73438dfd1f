"""Logits processors that are functions of one request: AdapterLogitsProcessor, and RequestFunctions for its parameters.

AdapterLogitsProcessor is the base of logits processors whose logic knows one request at a time. Its
`new_req_logits_processor` returns the function for a request, which is then called once per token.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens

if TYPE_CHECKING:
    import torch


class RequestLogitsProcessor(Protocol):
    """`f(output_ids, logits)` or `f(prompt_ids, output_ids, logits)`: lists of token ids and float32 [vocab]. Returns
    the new logits of the row."""

    def __call__(self, *args: Any) -> torch.Tensor: ...


class AdapterLogitsProcessor(LogitsProcessor):
    """A logits processor that is made of one function per request.

    Args:
        context: As for LogitsProcessor.
    """

    reads_tokens = True

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self._functions: dict[int, tuple[Callable[..., torch.Tensor], RowTokens]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """The function for a request with these parameters (a RequestLogitsProcessor), or None to leave its logits
        alone."""

    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> bool:
        function = self.new_req_logits_processor(params)
        if function is None:
            return False
        if _takes_prompt(function):
            function = partial(function, tokens.prompt.tolist())
        self._functions[row] = function, tokens
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        for i, row in enumerate(rows):
            function, tokens = self._functions[row]
            changed = function(tokens.output.tolist(), logits[i])
            if changed is None:
                raise TypeError(
                    "the function returned None; it must return the logits, also if it changes them in place"
                )
            logits[i] = changed
        return logits

    def remove_row(self, row: int) -> None:
        self._functions.pop(row, None)


class RequestFunctions(AdapterLogitsProcessor):
    """Runs the functions in `SamplingParams.logits_processors`, in their order."""

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        if not params.logits_processors:
            return None
        functions = [(each, _takes_prompt(each)) for each in params.logits_processors]

        def run_all(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            for function, takes_prompt in functions:
                logits = function(prompt_ids, output_ids, logits) if takes_prompt else function(output_ids, logits)
            return logits

        return run_all


def _takes_prompt(function: Callable[..., Any]) -> bool:
    return len(inspect.signature(function).parameters) > 2
