"""What a package may do to logits before a token is chosen: the interface of logits processors.

An entry point of `mvllm.logits_processors` names a LogitsProcessor class, which is used when the setting
`logits_processors` names it. One is made in each worker that samples, and serves all rows of all batches; requests tell
it what they want by `SamplingParams.extra_args` (`vllm_xargs` over HTTP), or by any other setting.

Nothing here loads torch: front ends ask the class about settings, and have no use for tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mvllm.errors import ConfigError, RequestError
from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform import plugin_groups
from mvllm.platform.discovery import PluginSource

if TYPE_CHECKING:
    import torch

    from mvllm.sampling.sampling_state import TokenHistory


@dataclass(frozen=True)
class LogitsProcessorContext:
    """What a processor works with.

    Attributes:
        vocab_size: Tokens in a row of logits.
        max_rows: Rows are 0 to max_rows - 1.
        device: Where logits are.
    """

    vocab_size: int
    max_rows: int
    device: torch.device


class RowTokens:
    """The tokens of one row as they are at each moment, for processors that say `reads_tokens`."""

    def __init__(self, history: TokenHistory, row: int) -> None:
        self._history, self._row = history, row

    @property
    def prompt(self) -> np.ndarray:
        """int32 [p]: the prompt; a view, not to be written to."""
        return self._history.token_ids[self._row, : self._history.num_prompt_tokens[self._row]]

    @property
    def output(self) -> np.ndarray:
        """int32 [o]: what was generated so far; likewise."""
        history, row = self._history, self._row
        return history.token_ids[row, history.num_prompt_tokens[row] : history.num_tokens[row]]


class LogitsProcessor(ABC):
    """Changes logits of the rows that it was given.

    What it does to a row may depend on that row's request and tokens alone, not on other rows, nor on how often it was
    called: a request that was preempted comes back with its tokens, in any row. All ranks that sample must do the same.

    Args:
        context: What it works with.

    Attributes:
        reads_tokens: Whether `apply` looks at the tokens of its rows. On devices that keep tokens to themselves, a
            step then waits for those of the step before.
    """

    reads_tokens: ClassVar[bool] = False

    def __init__(self, context: LogitsProcessorContext) -> None:
        self.context = context

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuses settings, in the front end, before a request is queued.

        Raises:
            Exception: Anything; its text is what the user reads.
        """
        return

    @abstractmethod
    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> bool:
        """A request takes a row, new or again after preemption.

        Returns:
            Whether its logits are to be changed. If not, the row is not heard of again.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Changes the logits of a batch, before any mask, bias or penalty.

        Args:
            logits: float32 [n, vocab]; may be changed in place.
            rows: n rows, all of them its own, each once.

        Returns:
            float32 [n, vocab]: the new logits; -inf for tokens that must not come.
        """

    def remove_row(self, row: int) -> None:
        """A row that it had has been taken back."""
        return


def processor_classes(names: Iterable[str]) -> list[tuple[PluginSource, type[LogitsProcessor]]]:
    """The classes that the setting `logits_processors` names.

    Raises:
        ConfigError: One is not installed, not let in, cannot be imported, or is none; names the package.
    """
    found = []
    for name in names:
        source, named = plugin_groups.load_plugin_by_name(plugin_groups.LOGITS_PROCESSORS, name)
        if not isinstance(named, type) or not issubclass(named, LogitsProcessor):
            raise ConfigError(f"{source} must name a subclass of mvllm.extension_api.LogitsProcessor, got {named!r}.")
        found.append((source, named))
    return found


def validate(classes: Iterable[tuple[PluginSource, type[LogitsProcessor]]], params: SamplingParams) -> None:
    """Has each class look at the settings of a request.

    Raises:
        RequestError: One refuses them.
    """
    for source, each in classes:
        try:
            each.validate_params(params)
        except RequestError:
            raise
        except Exception as e:
            reason = str(e) or type(e).__name__
            raise RequestError(f"The logits processor {source.name!r} refuses: {reason}", parameter="extra_args") from e
