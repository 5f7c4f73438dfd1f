"""The logits processors of one worker, and what happens when one fails: its requests do, one by one, and nothing else.

A processor that raises for a batch is called again for each of its rows alone, with logits as they were, so that an
error ends the request that caused it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.discovery import PluginSource
from mvllm.sampling.logits_processor import LogitsProcessor, LogitsProcessorContext, RowTokens, processor_classes

logger = get_logger(__name__)


class LogitsProcessorSet:
    """Those that the setting `logits_processors` names, in that order.

    Args:
        names: As the setting has them.
        context: What they work with.

    Raises:
        ConfigError: One cannot be had; names its package.
    """

    def __init__(self, names: Iterable[str], context: LogitsProcessorContext) -> None:
        self._processors = [_make(source, each, context) for source, each in processor_classes(names)]
        self._rows: dict[int, list[int]] = {}  # which of them have a row
        self._failures: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._processors)

    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> tuple[bool, bool]:
        """A request takes a row. A processor that raises fails the request in the first step that samples for it.

        Returns:
            Whether any has something to do for it, and whether any of these reads its tokens.
        """
        acting: list[int] = []
        for index, (source, processor) in enumerate(self._processors):
            try:
                if processor.add_row(row, params, tokens):
                    acting.append(index)
            except Exception as e:  # noqa: BLE001  (a plugin may raise anything; only this request ends of it)
                self._failures[row] = _report(source, e)
        if acting or row in self._failures:
            self._rows[row] = acting
        return row in self._rows, any(self._processors[index][1].reads_tokens for index in acting)

    def clear_row(self, row: int) -> None:
        """Takes a row back."""
        self._failures.pop(row, None)
        for index in self._rows.pop(row, ()):
            source, processor = self._processors[index]
            try:
                processor.remove_row(row)
            except Exception as e:  # noqa: BLE001  (its request has ended)
                _report(source, e)

    def indices_for(self, index: int, rows: Sequence[int]) -> list[int]:
        """The places among `rows` of those that the processor of this index has."""
        return [place for place, row in enumerate(rows) if index in self._rows.get(row, ())]

    def failures(self, rows: Sequence[int]) -> dict[int, str]:
        """What went wrong when they were added, by place among `rows`."""
        return {place: self._failures[row] for place, row in enumerate(rows) if row in self._failures}

    def apply(self, index: int, logits: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, dict[int, str]]:
        """Has one processor change the logits of its rows.

        Args:
            logits: float32 [n, vocab]; left as they are.

        Returns:
            The new logits, and what went wrong, by place among `rows`; the logits of these mean nothing.
        """
        source, processor = self._processors[index]
        try:
            return _applied(processor, logits, rows), {}
        except Exception as e:  # noqa: BLE001  (a plugin may raise anything; only its requests end of it)
            if len(rows) == 1:
                return logits, {0: _report(source, e)}
        parts = [self.apply(index, logits[place : place + 1], [row]) for place, row in enumerate(rows)]
        failures = {place: failed[0] for place, (_, failed) in enumerate(parts) if failed}
        return torch.cat([changed for changed, _ in parts]), failures


def _make(
    source: PluginSource, each: type[LogitsProcessor], context: LogitsProcessorContext
) -> tuple[PluginSource, LogitsProcessor]:
    try:
        return source, each(context)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        raise ConfigError(f"The logits processor {source} cannot be made: {type(e).__name__}: {e}") from e


def _applied(processor: LogitsProcessor, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    changed = processor.apply(logits.clone(), list(rows))
    same = isinstance(changed, torch.Tensor) and (changed.shape, changed.dtype) == (logits.shape, logits.dtype)
    if not same or changed.device != logits.device:
        raise TypeError(f"apply must give {logits.dtype} {list(logits.shape)} on {logits.device}, got {_kind(changed)}")
    return changed


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"a value of type {type(value).__name__}"


def _report(source: PluginSource, error: Exception) -> str:
    logger.error("The logits processor %s failed for a request, which ends.", source, exc_info=error)
    return f"the logits processor {source.name!r} failed for this request: {type(error).__name__}: {error}"
