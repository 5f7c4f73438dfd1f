"""The logits processors of one worker. An exception in one fails only the requests that cause it.

If a processor raises for a batch, it is called again for each row alone, with the original logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.sampling_params import SamplingParams
from mvllm.plugin_groups import PluginSource
from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens, processor_classes
from mvllm.sampling.request_logits_processor import RequestFunctions

logger = get_logger(__name__)


class LogitsProcessorSet:
    """The processors named by the setting `logits_processors`, in that order, then the functions of requests.

    Args:
        names: The setting's value.
        context: Passed to each processor.

    Raises:
        ConfigError: A processor cannot be created; the message names its package.
    """

    def __init__(self, names: Iterable[str], context: LogitsProcessorContext) -> None:
        classes = processor_classes(names)
        classes.append((PluginSource("functions of the request", "logits_processors", "mvllm", ""), RequestFunctions))
        self._processors = [_make(source, cls, context) for source, cls in classes]
        self._rows: dict[int, list[int]] = {}  # row -> indices of the processors that act on it
        self._failures: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._processors)

    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> tuple[bool, bool]:
        """Adds a request's row. A processor that raises fails the request in the first step that samples for it.

        Returns:
            Whether any processor acts on the row, and whether one of these reads its tokens.
        """
        acting: list[int] = []
        for index, (source, processor) in enumerate(self._processors):
            try:
                if processor.add_row(row, params, tokens):
                    acting.append(index)
            except Exception as e:  # noqa: BLE001  (a plugin may raise anything; only this request fails)
                self._failures[row] = _report(source, e)
        if acting or row in self._failures:
            self._rows[row] = acting
        return row in self._rows, any(self._processors[index][1].reads_tokens for index in acting)

    def clear_row(self, row: int) -> None:
        """Removes a row."""
        self._failures.pop(row, None)
        for index in self._rows.pop(row, ()):
            source, processor = self._processors[index]
            try:
                processor.remove_row(row)
            except Exception as e:  # noqa: BLE001  (its request has ended)
                _report(source, e)

    def indices_for(self, index: int, rows: Sequence[int]) -> list[int]:
        """Indices into `rows` of the rows on which the processor `index` acts."""
        return [i for i, row in enumerate(rows) if index in self._rows.get(row, ())]

    def failures(self, rows: Sequence[int]) -> dict[int, str]:
        """Errors of `add_row`, by index into `rows`."""
        return {i: self._failures[row] for i, row in enumerate(rows) if row in self._failures}

    def apply(self, index: int, logits: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Applies one processor to the logits of its rows.

        Args:
            logits: float32 [n, vocab]; not changed.

        Returns:
            The new logits, and errors by index into `rows`; the logits of failed rows are undefined.
        """
        source, processor = self._processors[index]
        try:
            return _apply_checked(processor, logits, rows), {}
        except Exception as e:  # noqa: BLE001  (a plugin may raise anything; only its requests fail)
            if len(rows) == 1:
                return logits, {0: _report(source, e)}
        parts = [self.apply(index, logits[i : i + 1], [row]) for i, row in enumerate(rows)]
        failures = {i: failed[0] for i, (_, failed) in enumerate(parts) if failed}
        return torch.cat([changed for changed, _ in parts]), failures


def _make(
    source: PluginSource, cls: type[LogitsProcessor], context: LogitsProcessorContext
) -> tuple[PluginSource, LogitsProcessor]:
    try:
        return source, cls(context)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(f"The logits processor {source} cannot be created: {type(e).__name__}: {e}") from e


def _apply_checked(processor: LogitsProcessor, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    changed = processor.apply(logits.clone(), list(rows))
    same = isinstance(changed, torch.Tensor) and (changed.shape, changed.dtype) == (logits.shape, logits.dtype)
    if not same or changed.device != logits.device:
        expected = f"{logits.dtype} {list(logits.shape)} on {logits.device}"
        raise TypeError(f"apply must return {expected}, not {_describe(changed)}")
    return changed


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"a value of type {type(value).__name__}"


def _report(source: PluginSource, error: Exception) -> str:
    logger.error("The logits processor %s failed for a request. The request ends.", source, exc_info=error)
    return f"the logits processor {source.name!r} failed for this request: {type(error).__name__}: {error}"
