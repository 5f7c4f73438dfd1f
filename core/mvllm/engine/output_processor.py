"""Turns what the engine core says about sequences into what callers see of requests.

The idea: one `_Sequence` per sequence collects token ids, text and log-probabilities; one `_Request` owns its n
sequences and says when it is worth showing. A request that only wants its final result (`FINAL_ONLY`) costs one
`list.extend` per step; without stop strings its text is decoded once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mvllm.engine.detokenizer import IncrementalDetokenizer, StopStrings
from mvllm.engine.input_processor import ProcessedRequest
from mvllm.engine.outputs import CompletionOutput, Logprob, PositionLogprobMap, RequestMetrics, RequestOutput
from mvllm.engine.tokenizer import Tokenizer
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PositionLogprobs,
)
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_STOP = str(FinishReason.STOP)


@dataclass(slots=True)
class ProcessedOutputs:
    """What one step means for callers, and for the engine core.

    Attributes:
        request_outputs: At most one per request.
        requests_to_abort: Core ids of sequences that ended here, on a stop string, while the core still runs them.
        num_new_tokens: Tokens that this step brought.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)
    num_new_tokens: int = 0


class OutputProcessor:
    """Follows all requests of one engine from the front end's side.

    Args:
        tokenizer: None where no request is detokenized.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add_request(self, request: ProcessedRequest, children: Sequence[EngineCoreRequest]) -> None:
        """Follows a request, whose sequences run in the engine core under the ids of `children`."""
        entry = _Request(request, self._tokenizer)
        entry.sequences = [
            _Sequence(entry, index, child.request_id, request.params, self._tokenizer)
            for index, child in enumerate(children)
        ]
        entry.num_unfinished = len(entry.sequences)
        self._requests[entry.request_id] = entry
        self._sequences.update((sequence.core_id, sequence) for sequence in entry.sequences)

    def process(self, core_outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Takes in one step's outputs. Sequences that are not followed (any more) are passed over."""
        result = ProcessedOutputs()
        now = time.monotonic()
        touched: dict[str, _Request] = {}
        for output in core_outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            result.num_new_tokens += len(output.new_token_ids)
            request = sequence.request
            try:
                request.note(output, now)
                sequence.take(output)
            except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends of it)
                sequence.fail(e)
            if sequence.finish_reason is not None:
                request.num_unfinished -= 1
                del self._sequences[output.request_id]
                if output.finish_reason is None:
                    result.requests_to_abort.append(output.request_id)
            if sequence.finish_reason is not None or not request.final_only:
                touched[request.request_id] = request
        for request_id, request in touched.items():
            if request.num_unfinished == 0:
                del self._requests[request_id]
            shown = request.show(now)
            if shown is not None:
                result.request_outputs.append(shown)
        return result

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Stops following requests; unknown ids are ignored.

        Returns:
            The core ids of their sequences that were still running.
        """
        core_ids: list[str] = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                core_ids += [s.core_id for s in request.sequences if self._sequences.pop(s.core_id, None) is not None]
        return core_ids

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is under way."""
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)


class _Request:
    """A request as its caller sees it."""

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None) -> None:
        self.request_id = request.core.request_id
        self.sequences: list[_Sequence] = []
        self.num_unfinished = 0
        self.kind = request.params.output_kind
        self.final_only = self.kind == RequestOutputKind.FINAL_ONLY
        self._prompt = request.prompt
        self._prompt_token_ids = request.core.prompt_token_ids
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._wants_prompt_logprobs = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[PositionLogprobMap | None] | None = None
        self._prompt_logprobs_shown = False
        self._num_cached_tokens: int | None = None
        self._metrics = RequestMetrics(arrival_time=request.core.arrival_time)

    def note(self, output: EngineCoreOutput, now: float) -> None:
        """Takes in what concerns the request as a whole."""
        metrics = self._metrics
        if output.new_token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if self._num_cached_tokens is None:
            # Later sequences of the request find the prompt in the cache because of the first, which is not news.
            self._num_cached_tokens = output.num_cached_tokens
            metrics.first_scheduled_time = output.scheduled_time or None
        if output.prompt_logprobs is not None and self._wants_prompt_logprobs:
            self._prompt_logprobs = [None, *(_as_map(p, self._tokenizer) for p in output.prompt_logprobs)]

    def show(self, now: float) -> RequestOutput | None:
        """What the caller gets after this step, if anything."""
        try:
            return self._show(now)
        except Exception as e:  # noqa: BLE001  (text is decoded here only where it has waited for the end)
            for sequence in self.sequences:
                sequence.fail(e)
            return self._show(now)

    def _show(self, now: float) -> RequestOutput | None:
        finished = self.num_unfinished == 0
        if self.final_only:
            if not finished:
                return None
            shown = [sequence.show_all() for sequence in self.sequences]
        elif self.kind == RequestOutputKind.DELTA:
            shown = [sequence.show_new() for sequence in self.sequences if sequence.has_news]
        else:
            shown = [sequence.show_all() for sequence in self.sequences]
        if not shown and not finished:
            return None
        if finished:
            self._metrics.finished_time = now
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            self._prompt_logprobs_to_show(),
            shown,
            finished,
            self._metrics.snapshot(),
            self._num_cached_tokens or 0,
        )

    def _prompt_logprobs_to_show(self) -> list[PositionLogprobMap | None] | None:
        """All of them, but only once where the output is made of pieces."""
        if self.kind == RequestOutputKind.DELTA and self._prompt_logprobs_shown:
            return None
        self._prompt_logprobs_shown = self._prompt_logprobs is not None
        # A prompt of one token has no position to predict: the list is known without the core's help.
        alone = self._wants_prompt_logprobs and len(self._prompt_token_ids) == 1
        return self._prompt_logprobs if self._prompt_logprobs is not None or not alone else [None]


class _Sequence:
    """One sequence: its tokens, its text, and whether it has ended."""

    def __init__(
        self, request: _Request, index: int, core_id: str, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        self._wants_logprobs = params.logprobs is not None
        self._logprobs: list[PositionLogprobMap] = []
        self._cumulative_logprob = 0.0
        self._text = _make_text(params, self._tokenizer, request.final_only)
        self._num_tokens_shown = 0
        self._num_chars_shown = 0
        self._end_shown = False

    def take(self, output: EngineCoreOutput) -> None:
        """Takes in the newest tokens and whether the core has ended the sequence."""
        new = output.new_token_ids
        ended = output.finish_reason
        if self._text is not None:
            num_used, stop = self._text.take(new, len(self.token_ids), ended)
            if stop is not None:
                self.finish_reason, self.stop_reason = _STOP, stop
                new = new[:num_used]
        self.token_ids += new
        if self._wants_logprobs and output.logprobs:
            for position in output.logprobs[: len(new)]:
                self._logprobs.append(_as_map(position, self._tokenizer))
                self._cumulative_logprob += position.logprobs[0]
        if ended is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = str(ended), output.stop_reason, output.error

    def fail(self, error: Exception) -> None:
        """Ends the sequence because its tokens cannot be turned into text."""
        self._text = None
        self.finish_reason, self.stop_reason = str(FinishReason.ERROR), None
        self.error = f"The tokenizer cannot turn the output into text: {type(error).__name__}: {error}"

    @property
    def has_news(self) -> bool:
        """Whether `show_new` would show anything."""
        return len(self.token_ids) > self._num_tokens_shown or (self.finish_reason is not None and not self._end_shown)

    def show_all(self) -> CompletionOutput:
        """Everything so far. Later steps do not change what was shown."""
        text = self._text.visible(ended=self.finish_reason is not None) if self._text is not None else ""
        logprobs = list(self._logprobs) if self._wants_logprobs else None
        return self._completion(text, list(self.token_ids), logprobs)

    def show_new(self) -> CompletionOutput:
        """What has come since the last call."""
        text = self._text.visible(ended=self.finish_reason is not None) if self._text is not None else ""
        start = self._num_tokens_shown
        logprobs = self._logprobs[start:] if self._wants_logprobs else None
        shown = self._completion(text[self._num_chars_shown :], self.token_ids[start:], logprobs)
        self._num_tokens_shown = len(self.token_ids)
        self._num_chars_shown = len(text)
        self._end_shown = self.finish_reason is not None
        return shown

    def _completion(
        self, text: str, token_ids: list[int], logprobs: list[PositionLogprobMap] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self._cumulative_logprob if self._wants_logprobs else None,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
        )


class _Text:
    """The text of a sequence that is decoded as it grows, with stop strings."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._include_stop = params.include_stop_str_in_output
        self._stop = StopStrings(params.stop or (), self._include_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._text = ""

    def take(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Decodes new tokens up to the first stop string.

        Args:
            num_before: Tokens that the sequence had before these.
            ended: Why the core has ended the sequence, if it has.

        Returns:
            How many of `new` belong to the sequence, and the stop string that was found.
        """
        shown = _without_end_token(new, ended, self._include_stop)
        if self._stop is None:
            self._text += self._detokenizer.append(shown)
        else:
            for i, token_id in enumerate(shown, start=1):
                stop = self._grow(self._detokenizer.append((token_id,)), checked=num_before + i > self._min_tokens)
                if stop is not None:
                    return i, stop
        if ended is not None:
            stop = self._grow(self._detokenizer.finish(), checked=num_before + len(new) > self._min_tokens)
            if stop is not None:
                return len(new), stop
        return len(new), None

    def visible(self, *, ended: bool) -> str:
        """The text that may be shown: all of it at the end, before that nothing that may begin a stop string."""
        if self._stop is None or ended:
            return self._text
        held = self._stop.held_back(self._text)
        return self._text[:-held] if held else self._text

    def _grow(self, piece: str, *, checked: bool) -> str | None:
        settled = len(self._text)
        self._text += piece
        if self._stop is None or not checked or not piece:
            return None
        found = self._stop.find(self._text, settled)
        if found is None:
            return None
        stop, length = found
        self._text = self._text[:length]
        return stop


class _TextAtEnd:
    """The text of a sequence that nobody reads before it ends: decoded in one go."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids: list[int] = []
        self._include_stop = params.include_stop_str_in_output

    def take(self, new: Sequence[int], num_before: int, ended: FinishReason | None) -> tuple[int, str | None]:
        """Keeps new tokens; see `_Text.take`."""
        self._token_ids += new if ended is None else _without_end_token(new, ended, self._include_stop)
        return len(new), None

    def visible(self, *, ended: bool) -> str:
        """The whole text."""
        return self._tokenizer.decode(
            self._token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )


def _make_text(params: SamplingParams, tokenizer: Tokenizer | None, final_only: bool) -> _Text | _TextAtEnd | None:
    if tokenizer is None:
        return None
    return _TextAtEnd(params, tokenizer) if final_only and not params.stop else _Text(params, tokenizer)


def _without_end_token(new: Sequence[int], ended: FinishReason | None, include: bool) -> Sequence[int]:
    """The tokens that count for the text: the token that ended the sequence is not part of it unless asked for."""
    return new[:-1] if ended == FinishReason.STOP and not include else new


def _as_map(position: PositionLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobMap:
    """The token at the position first, then the most probable ones, whose ranks are their places."""
    token_ids, logprobs = position.token_ids, position.logprobs
    text = tokenizer.token_text if tokenizer is not None else _no_text
    first = token_ids[0]
    result = {first: Logprob(logprobs[0], position.rank, text(first))}
    for rank, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:], strict=True), start=1):
        if token_id != first:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result


def _no_text(token_id: int) -> None:
    return None
