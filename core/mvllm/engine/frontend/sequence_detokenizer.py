"""The text of one sequence, decoded no more often than somebody looks at it."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.engine.frontend.incremental_detokenizer import IncrementalDetokenizer, StopStringFinder
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import SamplingParams


class StopStringDetokenizer:
    """The text of a sequence that is decoded as it grows, because stop strings are looked for."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._detokenizer = _make_incremental_detokenizer(params, tokenizer)
        self._include_stop = params.include_stop_str_in_output
        self._stop = StopStringFinder(params.stop or (), self._include_stop)
        self._min_tokens = params.min_tokens
        self._text = ""
        self._num_shown = 0

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Decodes new tokens up to the first stop string.

        Args:
            num_before: Tokens that the sequence had before these.
            ended: Why the core has ended the sequence, if it has.

        Returns:
            How many of `new` belong to the sequence, and the stop string that was found.
        """
        shown = _without_end_token(new, ended, self._include_stop)
        for i, token_id in enumerate(shown, start=1):
            stop = self._append_text(self._detokenizer.append((token_id,)), checked=num_before + i > self._min_tokens)
            if stop is not None:
                return i, stop
        if ended is not None:
            stop = self._append_text(self._detokenizer.finish(), checked=num_before + len(new) > self._min_tokens)
            if stop is not None:
                return len(new), stop
        return len(new), None

    def full_text(self, *, ended: bool) -> str:
        """The text that may be shown: all of it at the end, before that nothing that may begin a stop string."""
        if ended:
            return self._text
        held = self._stop.num_held_back(self._text)
        return self._text[:-held] if held else self._text

    def new_text(self, *, ended: bool) -> str:
        """What has become visible since the last call."""
        text = self.full_text(ended=ended)
        shown, self._num_shown = self._num_shown, len(text)
        return text[shown:]

    def _append_text(self, piece: str, *, checked: bool) -> str | None:
        settled = len(self._text)
        self._text += piece
        if not checked or not piece:
            return None
        found = self._stop.find(self._text, settled)
        if found is None:
            return None
        stop, length = found
        self._text = self._text[:length]
        return stop


class LazyDetokenizer:
    """The text of a sequence in which nothing is looked for: decoded when it is asked for, many tokens at once if it is
    asked for seldom.

    Args:
        token_ids: The sequence's, which grows.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, token_ids: list[int]) -> None:
        self._detokenizer = _make_incremental_detokenizer(params, tokenizer)
        self._include_stop = params.include_stop_str_in_output
        self._token_ids = token_ids
        self._num_decoded = 0
        self._excludes_last_token = False
        self._text = ""

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Notes whether the last token is part of the text; see `StopStringDetokenizer.take`."""
        self._excludes_last_token = ended == FinishReason.STOP and not self._include_stop
        return len(new), None

    def full_text(self, *, ended: bool) -> str:
        """All that is settled; at the end, all."""
        self._text += self.new_text(ended=ended)
        return self._text

    def new_text(self, *, ended: bool) -> str:
        """What has become visible since the last call."""
        ids = self._token_ids[self._num_decoded : -1 if self._excludes_last_token else None]
        self._num_decoded = len(self._token_ids)
        piece = self._detokenizer.append(ids)
        return piece + self._detokenizer.finish() if ended else piece


class FinalOnlyDetokenizer:
    """The text of a sequence that nobody reads before it ends: decoded in one go."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids: list[int] = []
        self._include_stop = params.include_stop_str_in_output

    def append(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Keeps new tokens; see `StopStringDetokenizer.take`."""
        self._token_ids += new if ended is None else _without_end_token(new, ended, self._include_stop)
        return len(new), None

    def new_text(self, *, ended: bool) -> str:
        """The whole text; asked for once."""
        return self.full_text(ended=ended)

    def full_text(self, *, ended: bool) -> str:
        """The whole text."""
        return self._tokenizer.decode(
            self._token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )


SequenceDetokenizer = StopStringDetokenizer | LazyDetokenizer | FinalOnlyDetokenizer


def make_sequence_detokenizer(
    params: SamplingParams, tokenizer: Tokenizer | None, final_only: bool, token_ids: list[int]
) -> SequenceDetokenizer | None:
    """What turns a sequence into text in the cheapest way that serves it; None where there is no text.

    Args:
        tokenizer: None where the sequence is not detokenized.
        final_only: Nothing is shown before its end.
        token_ids: The sequence's, which grows.
    """
    if tokenizer is None:
        return None
    if params.stop:
        return StopStringDetokenizer(params, tokenizer)
    return FinalOnlyDetokenizer(params, tokenizer) if final_only else LazyDetokenizer(params, tokenizer, token_ids)


def _make_incremental_detokenizer(params: SamplingParams, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def _without_end_token(new: Sequence[int], ended: FinishReason | None, include: bool) -> Sequence[int]:
    """The tokens that count for the text: the token that ended the sequence is not part of it unless asked for."""
    return new[:-1] if ended == FinishReason.STOP and not include else new
