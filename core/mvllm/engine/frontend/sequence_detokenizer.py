"""Three detokenizers of a sequence: with stop strings, lazy, and at the end only.

`make_sequence_detokenizer` chooses the cheapest one that a request allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.frontend.incremental_detokenizer import IncrementalDetokenizer, StopStringFinder
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import SamplingParams


class StopStringDetokenizer:
    """Decodes every token at once and searches the text for stop strings."""

    def __init__(self, params: SamplingParams, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop_str_in_output
        self._stop = StopStringFinder(params.stop or (), self._include_stop)
        self._min_tokens = params.min_tokens
        self._text = ""
        self._num_returned = 0

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Decodes new tokens up to the first stop string.

        Args:
            num_before: Tokens of the sequence before `new`.
            ended: The core's finish reason, if it has ended the sequence.

        Returns:
            The number of tokens of `new` that belong to the sequence, and the stop string that was found.
        """
        visible = _without_end_token(new, ended, self._include_stop)
        for i, token_id in enumerate(visible, start=1):
            stop = self._append_text(self._detokenizer.append((token_id,)), checked=num_before + i > self._min_tokens)
            if stop is not None:
                return i, stop
        if ended is not None:
            stop = self._append_text(self._detokenizer.finish(), checked=num_before + len(new) > self._min_tokens)
            if stop is not None:
                return len(new), stop
        return len(new), None

    def full_text(self, *, ended: bool) -> str:
        """The text without a possible beginning of a stop string at its end; all of it if the sequence has ended."""
        if ended:
            return self._text
        held = self._stop.num_held_back(self._text)
        return self._text[:-held] if held else self._text

    def new_text(self, *, ended: bool) -> str:
        """The part of the text that is new since the last call."""
        text = self.full_text(ended=ended)
        start, self._num_returned = self._num_returned, len(text)
        return text[start:]

    def _append_text(self, piece: str, *, checked: bool) -> str | None:
        num_checked = len(self._text)
        self._text += piece
        if not checked or not piece:
            return None
        found = self._stop.find(self._text, num_checked)
        if found is None:
            return None
        stop, length = found
        self._text = self._text[:length]
        return stop


class LazyDetokenizer:
    """Decodes on demand: all tokens since the last call at once. For sequences without stop strings.

    Args:
        token_ids: The token ids of the sequence; the caller appends to this list.
    """

    def __init__(self, params: SamplingParams, detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop_str_in_output
        self._token_ids = token_ids
        self._num_decoded = 0
        self._excludes_last_token = False
        self._text = ""

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Records whether the last token is part of the text; see `StopStringDetokenizer.append`."""
        self._excludes_last_token = ended == FinishReason.STOP and not self._include_stop
        return len(new), None

    def full_text(self, *, ended: bool) -> str:
        """The text that later tokens cannot change; all of it if the sequence has ended."""
        self._text += self.new_text(ended=ended)
        return self._text

    def new_text(self, *, ended: bool) -> str:
        """The part of the text that is new since the last call."""
        ids = self._token_ids[self._num_decoded : -1 if self._excludes_last_token else None]
        self._num_decoded = len(self._token_ids)
        piece = self._detokenizer.append(ids)
        return piece + self._detokenizer.finish() if ended else piece


class FinalOnlyDetokenizer:
    """Decodes the whole sequence in one call, after its end. For output kind FINAL_ONLY."""

    def __init__(self, params: SamplingParams, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._include_stop = params.include_stop_str_in_output

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Stores new tokens; see `StopStringDetokenizer.append`."""
        self._token_ids += new if ended is None else _without_end_token(new, ended, self._include_stop)
        return len(new), None

    def new_text(self, *, ended: bool) -> str:
        """The whole text; called once."""
        return self.full_text(ended=ended)

    def full_text(self, *, ended: bool) -> str:
        """The whole text; called once."""
        return self._detokenizer.finish(self._token_ids)


SequenceDetokenizer = StopStringDetokenizer | LazyDetokenizer | FinalOnlyDetokenizer


def make_sequence_detokenizer(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    final_only: bool,
    token_ids: list[int],
    prompt_token_ids: Sequence[int] = (),
) -> SequenceDetokenizer | None:
    """The detokenizer of a sequence; None if it is not detokenized.

    Args:
        tokenizer: None if the sequence is not detokenized.
        final_only: Whether there is no output before the end.
        token_ids: The token ids of the sequence; the caller appends to this list.
        prompt_token_ids: The tokens before the sequence.
    """
    if tokenizer is None:
        return None
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    if params.stop:
        return StopStringDetokenizer(params, detokenizer)
    return FinalOnlyDetokenizer(params, detokenizer) if final_only else LazyDetokenizer(params, detokenizer, token_ids)


def _without_end_token(new: Sequence[int], ended: FinishReason | None, include: bool) -> Sequence[int]:
    """The tokens of the text: without the token that ended the sequence, unless `include`."""
    return new[:-1] if ended == FinishReason.STOP and not include else new
