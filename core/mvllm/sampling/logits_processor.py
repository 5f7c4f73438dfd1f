"""Interface of logits processors, with which a package changes logits before a token is sampled.

An entry point of `mvllm.logits_processors` names a LogitsProcessor class, which is used if the setting
`logits_processors` names it. Each worker that samples creates one instance for all rows of all batches. Requests
parameterize it through `SamplingParams.extra_args` (`vllm_xargs` over HTTP) or any other sampling parameter.

This module does not import torch: front ends validate parameters without tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mvllm import plugin_groups
from mvllm.errors import ConfigError, RequestError
from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.discovery import load_attribute
from mvllm.plugin_groups import PluginSource

if TYPE_CHECKING:
    import torch

    from mvllm.sampling.token_history import TokenHistory


@dataclass(frozen=True)
class LogitsProcessorContext:
    """What a processor is created with.

    Attributes:
        vocab_size: Tokens in a row of logits.
        max_rows: Rows are 0 to max_rows - 1.
        device: The device of the logits.
    """

    vocab_size: int
    max_rows: int
    device: torch.device


class RowTokens:
    """The current tokens of one row, for processors with `reads_tokens`."""

    def __init__(self, history: TokenHistory, row: int) -> None:
        self._history, self._row = history, row

    @property
    def prompt(self) -> np.ndarray:
        """int32 [p]: the prompt; a read-only view."""
        return self._history.token_ids[self._row, : self._history.num_prompt_tokens[self._row]]

    @property
    def output(self) -> np.ndarray:
        """int32 [o]: the tokens generated so far; a read-only view."""
        history, row = self._history, self._row
        return history.token_ids[row, history.num_prompt_tokens[row] : history.num_tokens[row]]


class LogitsProcessor(ABC):
    """Changes the logits of rows whose requests it accepted in `add_row`.

    The result for a row must depend on the row's request and tokens alone, not on other rows or on the number of calls:
    a preempted request comes back with its tokens, in any row. All ranks that sample must compute the same result.

    Args:
        context: Sizes and device.

    Attributes:
        reads_tokens: `apply` reads the tokens of its rows. On devices that keep sampled tokens, a step then waits for
            the tokens of the previous one.
    """

    reads_tokens: ClassVar[bool] = False

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.context = context

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Validates the parameters of a request in the front end, before it is queued.

        Raises:
            Exception: The parameters are invalid. The user reads the message.
        """
        return

    @abstractmethod
    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> bool:
        """Adds a request, new or resumed after preemption.

        Returns:
            Whether to change its logits. If not, there are no further calls for this row and request.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Changes the logits of a batch, before any mask, bias or penalty.

        Args:
            logits: float32 [n, vocab]; may be changed in place.
            rows: n different rows, all added before.

        Returns:
            float32 [n, vocab]: the new logits; -inf blocks a token.
        """

    def remove_row(self, row: int) -> None:
        """Removes a row that was added."""
        return


def processor_classes(names: Iterable[str]) -> list[tuple[PluginSource, type[LogitsProcessor]]]:
    """The classes named by the setting `logits_processors`: of installed packages, or at `module:Class`.

    Raises:
        ConfigError: One is not installed, not allowed, cannot be imported, or is not a LogitsProcessor; names the
            package.
    """
    found = []
    for name in names:
        if ":" in name:
            source, named = PluginSource(name, name, "the path", ""), _class_at(name)
        else:
            source, named = plugin_groups.load_plugin_by_name(plugin_groups.LOGITS_PROCESSORS, name)
        if not isinstance(named, type) or not issubclass(named, LogitsProcessor):
            raise ConfigError(f"{source} must name a subclass of mvllm.extension_api.LogitsProcessor, got {named!r}.")
        found.append((source, named))
    return found


def _class_at(path: str) -> object:
    """The class at `module:Class`, which may also be a class of the running script."""
    try:
        return load_attribute(path)
    except Exception as e:
        raise ConfigError(
            f"logits_processors names {path!r}, which cannot be imported: {e}. Worker processes import it, too: its "
            "module must be importable there, which a script that was started as a program is not."
        ) from e


def validate(classes: Iterable[tuple[PluginSource, type[LogitsProcessor]]], params: SamplingParams) -> None:
    """Validates the parameters of a request with each class.

    Raises:
        RequestError: One rejects them.
    """
    for source, each in classes:
        try:
            each.validate_params(params)
        except RequestError:
            raise
        except Exception as e:
            reason = str(e) or type(e).__name__
            message = f"The logits processor {source.name!r} rejects the request: {reason}"
            raise RequestError(message, parameter="extra_args") from e
