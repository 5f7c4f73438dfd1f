"""Turns what the engine core says about sequences into what callers see of requests.

The idea: one `_Sequence` per sequence collects token ids, text and log-probabilities; one `RequestState` owns its n
sequences and says what there is to show. A request that only wants its final result (`FINAL_ONLY`) costs one
`list.extend` per step; without stop strings its text is decoded once, at the end.

A beam search has a `BeamSearch` between the two: what comes from the core goes there, each round asks for the next, and
the sequences are filled when it is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mvllm.engine.frontend.beam_search import Beam, BeamSearch
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import CompletionOutput, Logprob, PositionLogprobMap, RequestMetrics, RequestOutput
from mvllm.engine.frontend.sequence_detokenizer import LazyDetokenizer, make_sequence_detokenizer
from mvllm.engine.frontend.tokenizer import Tokenizer
from mvllm.messages.pooling_params import PoolingType
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
class OutputProcessorOutput:
    """What one step means for callers, and for the engine core.

    Attributes:
        request_outputs: At most one per request.
        requests_to_abort: Core ids of sequences that ended here, on a stop string, while the core still runs them.
        num_new_tokens: Tokens that this step brought.
        requests_to_add: What searches ask of the engine core next, each one's requests together.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)
    num_new_tokens: int = 0
    requests_to_add: list[list[EngineCoreRequest]] = field(default_factory=list)


@dataclass(slots=True)
class ProcessedStep:
    """What one step has changed.

    Attributes:
        requests: Those with something to show that had nothing to show before.
        requests_to_abort, num_new_tokens, requests_to_add: As in OutputProcessorOutput.
        started: Requests whose first token this is.
        finished: Requests that have ended.
        inter_token_gaps: How many tokens came how long after the one before, in seconds; the newest of each output.
    """

    requests: list[RequestState] = field(default_factory=list)
    requests_to_abort: list[str] = field(default_factory=list)
    num_new_tokens: int = 0
    started: list[RequestState] = field(default_factory=list)
    finished: list[RequestState] = field(default_factory=list)
    inter_token_gaps: dict[float, int] = field(default_factory=dict)
    requests_to_add: list[list[EngineCoreRequest]] = field(default_factory=list)


class OutputProcessor:
    """Follows all requests of one engine from the front end's side.

    Args:
        tokenizer: None where no request is detokenized.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, _Sequence | _BeamStep] = {}

    def add_request(
        self,
        request: ProcessedRequest,
        children: Sequence[EngineCoreRequest],
        key: str | None = None,
        search: BeamSearch | None = None,
    ) -> RequestState:
        """Follows a request, whose sequences run in the engine core under the ids of `children`.

        Args:
            search: Whose first round `children` are, if they are one's.
            key: What the request is called here; by default the caller's id, which then has to be unique.
        """
        entry = RequestState(request, self._tokenizer, key)
        core_ids = [child.request_id for child in children] if search is None else [""] * request.params.n
        entry.sequences = [
            _Sequence(entry, index, core_id, request.params, self._tokenizer) for index, core_id in enumerate(core_ids)
        ]
        entry.num_unfinished = len(entry.sequences)
        entry.search = search
        self._requests[entry.key] = entry
        if search is None:
            self._sequences.update((sequence.core_id, sequence) for sequence in entry.sequences)
        else:
            self._register_beam_round(entry, children)
        return entry

    def _register_beam_round(self, entry: RequestState, children: Sequence[EngineCoreRequest]) -> None:
        self._sequences.update((child.request_id, _BeamStep(entry, child.request_id)) for child in children)

    def process_outputs(self, core_outputs: EngineCoreOutputs) -> OutputProcessorOutput:
        """Takes in one step's outputs and shows what they mean, at once. Unknown sequences are passed over."""
        taken = self.apply_outputs(core_outputs)
        result = OutputProcessorOutput([], taken.requests_to_abort, taken.num_new_tokens, taken.requests_to_add)
        for request in taken.requests:
            shown, broken = self.make_request_output(request)
            result.requests_to_abort += broken
            if shown is not None:
                result.request_outputs.append(shown)
        return result

    def apply_outputs(self, core_outputs: EngineCoreOutputs) -> ProcessedStep:
        """Takes in one step's outputs. Sequences that are not followed (any more) are passed over.

        What requests have to show is left to `RequestState.show`; until that is called, what comes adds up.
        """
        taken = ProcessedStep()
        now = time.monotonic()
        sequences, gaps = self._sequences, taken.inter_token_gaps
        num_new_tokens = 0
        for output in core_outputs.outputs:
            sequence = sequences.get(output.request_id)
            if sequence is None:
                continue
            request, last = sequence.request, sequence.last_token_time
            new = output.new_token_ids
            if new:
                num_new_tokens += len(new)
                sequence.last_token_time = now
                if last:
                    gaps[last] = gaps.get(last, 0) + 1
                elif request.metrics.first_token_time is None:
                    taken.started.append(request)
            if last and sequence.uses_fast_path and output.finish_reason is None:
                sequence.token_ids += new  # the usual case, once per token: all else waits until it is shown
            elif isinstance(sequence, _BeamStep):
                if not self._apply_beam_output(sequence, output, now, taken):
                    continue
            elif not self._apply_slow_path(sequence, output, now, taken):
                continue
            if not request.has_new_output:
                request.has_new_output = True
                taken.requests.append(request)
        taken.num_new_tokens = num_new_tokens
        taken.inter_token_gaps = {now - last: count for last, count in gaps.items()}
        return taken

    def _apply_slow_path(self, sequence: _Sequence, output: EngineCoreOutput, now: float, taken: ProcessedStep) -> bool:
        """Takes in an output that may be a sequence's first or last, or more than tokens; whether there is news."""
        request = sequence.request
        try:
            request.update_from_output(output, now)
            sequence.append_output(output)
        except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends of it)
            sequence.fail(e)
        if sequence.finish_reason is None:
            return not request.final_only
        if output.finish_reason is None:
            taken.requests_to_abort.append(sequence.core_id)
        if self._finish_sequence(sequence, now):
            taken.finished.append(request)
        return True

    def _apply_beam_output(self, step: _BeamStep, output: EngineCoreOutput, now: float, taken: ProcessedStep) -> bool:
        """Takes in what has come of one beam's next token; whether the search is over. What goes wrong with one beam
        ends all."""
        request, search = step.request, step.request.search
        assert search is not None
        beams: Sequence[Beam] = ()
        request.update_from_output(output, now)
        del self._sequences[step.core_id]
        is_round_over = search.record_output(output)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            parameter = output.error_parameter
            end = EngineCoreOutput("", [], output.finish_reason, error=output.error, error_parameter=parameter)
            ends = [end] * len(request.sequences)
            if output.finish_reason is FinishReason.ERROR:
                taken.requests_to_abort += search.core_ids
            for core_id in search.core_ids:
                self._sequences.pop(core_id, None)
        elif not is_round_over:
            return False
        elif not search.advance():
            children = search.make_requests()
            self._register_beam_round(request, children)
            taken.requests_to_add.append(children)
            return False
        else:
            beams = search.results()
            ends = [_beam_to_core_output(beam) for beam in beams]
            del request.sequences[max(1, len(ends)) :]
            if not ends:
                what = "no sequence can end: every token that could come ends it, and min_tokens forbids that"
                ends = [EngineCoreOutput("", [], FinishReason.ERROR, error=what)]
        for sequence, end in zip(request.sequences, ends, strict=True):
            sequence.last_token_time = now
            try:
                sequence.append_output(end)
            except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends of it)
                sequence.fail(e)
        for sequence, beam in zip(request.sequences, beams, strict=False):
            sequence.cumulative_logprob = beam.cumulative_logprob
        request.num_unfinished = 0
        self._finish_request(request, now)
        taken.finished.append(request)
        return True

    def _finish_sequence(self, sequence: _Sequence, now: float) -> bool:
        """Stops following a sequence that has ended; returns whether its request has, too."""
        del self._sequences[sequence.core_id]
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._finish_request(request, now)
        return request.num_unfinished == 0

    def _finish_request(self, request: RequestState, now: float) -> None:
        request.metrics.finished_time = now
        self._requests.pop(request.key, None)

    def make_request_output(self, request: RequestState) -> tuple[RequestOutput | None, list[str]]:
        """What the caller gets now, if anything: all there is, or all that was not shown yet.

        Returns:
            It, and the core ids of sequences that end here, because their tokens cannot be turned into text.
        """
        output = request.make_request_output()
        if not request.undecodable_core_ids:
            return output, []
        broken, request.undecodable_core_ids = request.undecodable_core_ids, []
        for core_id in broken:
            self._sequences.pop(core_id, None)
        if request.num_unfinished == 0:
            self._finish_request(request, time.monotonic())
        return output, broken

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Stops following requests; unknown ids are ignored.

        Returns:
            The core ids of their sequences that were still running.
        """
        core_ids: list[str] = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                core_ids += [i for i in request.core_ids if self._sequences.pop(i, None) is not None]
        return core_ids

    def end_requests(self, requests: Iterable[RequestState]) -> tuple[ProcessedStep, list[str]]:
        """Ends requests with what they have, for the reason `abort`; those that have ended are passed over.

        Returns:
            As `take`; and the core ids of their sequences that were still running.
        """
        running = [i for request in requests for i in request.core_ids if i in self._sequences]
        ends = [EngineCoreOutput(core_id, [], FinishReason.ABORT) for core_id in running]
        return self.apply_outputs(EngineCoreOutputs(outputs=ends)), running

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is under way."""
        return request_id in self._requests

    @property
    def request_ids(self) -> list[str]:
        """Of the requests under way, as they are called here."""
        return list(self._requests)

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)


class RequestState:
    """A request as its caller sees it.

    Attributes:
        request_id: As the caller calls it.
        key: As the OutputProcessor calls it.
        num_unfinished: Sequences that have not ended.
        has_new_output: Whether `show` may have something to show that it has not shown.
        broken: Core ids of sequences that `show` has found to be no text, which the OutputProcessor still follows.
        final_only: Whether it shows nothing before its end.
        is_pooling: Whether it is for a vector, and has no tokens.
        num_sequences: As it takes up room: those that it may have in the engine core at a time.
        search: Finds its sequences, if it is for a beam search.
        metrics: When things happened.
    """

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer | None, key: str | None = None) -> None:
        self.request_id = request.core.request_id
        self.key = key or self.request_id
        self.params = request.params
        self.sequences: list[_Sequence] = []
        self.num_unfinished = 0
        self.has_new_output = False
        self.undecodable_core_ids: list[str] = []
        self.num_sequences = request.params.num_sequences
        self.search: BeamSearch | None = None
        self.is_ranked = request.params.is_ranked
        self.kind = RequestOutputKind.FINAL_ONLY if self.is_ranked else request.params.output_kind
        self.final_only = self.kind == RequestOutputKind.FINAL_ONLY
        pooling = request.core.pooling_params
        self.is_pooling = pooling is not None
        self._pools_each_token = pooling is not None and pooling.pooling_type is PoolingType.ALL
        self._prompt = request.prompt
        self._prompt_token_ids = request.core.prompt_token_ids
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._wants_prompt_logprobs = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[PositionLogprobMap | None] | None = None
        self._prompt_logprobs_returned = False
        self._num_cached_tokens: int | None = None
        self._pooled: bytes | None = None
        self._lora_request = request.core.lora_request
        self.metrics = RequestMetrics(arrival_time=request.core.arrival_time)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt_token_ids)

    @property
    def core_ids(self) -> list[str]:
        """Of its sequences, whether they have ended or not."""
        return [sequence.core_id for sequence in self.sequences] if self.search is None else self.search.core_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self._num_cached_tokens or 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens so far, over all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def update_from_output(self, output: EngineCoreOutput, now: float) -> None:
        """Takes in what concerns the request as a whole."""
        metrics = self.metrics
        if output.new_token_ids and metrics.first_token_time is None:
            metrics.first_token_time = output.first_token_time or now
        if self._num_cached_tokens is None:
            # Later sequences of the request find the prompt in the cache because of the first, which is not news.
            self._num_cached_tokens = output.num_cached_tokens
            metrics.first_scheduled_time = output.scheduled_time or None
        if output.prompt_logprobs is not None and self._wants_prompt_logprobs:
            self._prompt_logprobs = [None, *(_to_logprob_map(p, self._tokenizer) for p in output.prompt_logprobs)]
        if output.pooling_output is not None:
            self._pooled = output.pooling_output

    def make_request_output(self) -> RequestOutput | None:
        """What the caller gets now, if anything: all there is, or all that was not shown yet."""
        self.has_new_output = False
        sequences = self.sequences
        if self.final_only:
            if self.num_unfinished:
                return None
            shown = [sequence.make_full_output() for sequence in sequences]
            if self.is_ranked and self.search is None:
                shown = _best_sequences(shown, self.params.n)
        elif self.kind == RequestOutputKind.DELTA:
            shown = [sequence.make_delta_output() for sequence in sequences if sequence.has_new_output]
        else:
            shown = [sequence.make_full_output() for sequence in sequences]
        finished = self.num_unfinished == 0  # as of now: text that cannot be decoded is an end, too
        if not shown and not finished:
            return None
        self.metrics.last_token_time = max([sequence.last_token_time for sequence in sequences]) or None
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            self._next_prompt_logprobs(),
            shown,
            finished,
            self.metrics.snapshot(),
            self._num_cached_tokens or 0,
            self._pooled,
            self._pools_each_token,
            self._lora_request,
        )

    def _next_prompt_logprobs(self) -> list[PositionLogprobMap | None] | None:
        """All of them, but only once where the output is made of pieces."""
        if self.kind == RequestOutputKind.DELTA and self._prompt_logprobs_returned:
            return None
        self._prompt_logprobs_returned = self._prompt_logprobs is not None
        # A prompt of one token has no position to predict: the list is known without the core's help.
        alone = self._wants_prompt_logprobs and len(self._prompt_token_ids) == 1
        return self._prompt_logprobs if self._prompt_logprobs is not None or not alone else [None]


class _Sequence:
    """One sequence: its tokens, its text, and whether it has ended."""

    def __init__(
        self, request: RequestState, index: int, core_id: str, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_parameter: str | None = None
        self.last_token_time = 0.0
        self._tokenizer = tokenizer if params.detokenize else None
        self._wants_logprobs = params.logprobs is not None
        self._wants_sum = self._wants_logprobs or params.is_ranked
        self._logprobs: list[PositionLogprobMap] = []
        self.cumulative_logprob = 0.0
        self._text = make_sequence_detokenizer(params, self._tokenizer, request.final_only, self.token_ids)
        self.uses_fast_path = not self._wants_sum and (self._text is None or isinstance(self._text, LazyDetokenizer))
        self._num_tokens_returned = 0
        self._end_returned = False

    def append_output(self, output: EngineCoreOutput) -> None:
        """Takes in the newest tokens and whether the core has ended the sequence."""
        new = output.new_token_ids
        ended = output.finish_reason
        if self._text is not None:
            num_used, stop = self._text.append(new, len(self.token_ids), ended)
            if stop is not None:
                self.finish_reason, self.stop_reason = _STOP, stop
                new = new[:num_used]
        self.token_ids += new
        if self._wants_sum and output.logprobs:
            for position in output.logprobs[: len(new)]:
                if self._wants_logprobs:
                    self._logprobs.append(_to_logprob_map(position, self._tokenizer))
                self.cumulative_logprob += position.logprobs[0]
        if ended is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = str(ended), output.stop_reason, output.error
            self.error_parameter = output.error_parameter

    def fail(self, error: Exception) -> None:
        """Ends the sequence because its tokens cannot be turned into text."""
        self._text = None
        self.finish_reason, self.stop_reason = str(FinishReason.ERROR), None
        self.error = f"The tokenizer cannot turn the output into text: {type(error).__name__}: {error}"

    @property
    def has_new_output(self) -> bool:
        """Whether `make_delta_output` would show anything."""
        return len(self.token_ids) > self._num_tokens_returned or (
            self.finish_reason is not None and not self._end_returned
        )

    def make_full_output(self) -> CompletionOutput:
        """Everything so far. Later steps do not change what was shown."""
        text = self._visible_text(new=False)
        logprobs = list(self._logprobs) if self._wants_logprobs else None
        return self._make_completion_output(text, list(self.token_ids), logprobs)

    def make_delta_output(self) -> CompletionOutput:
        """What has come since the last call."""
        text = self._visible_text(new=True)
        start = self._num_tokens_returned
        logprobs = self._logprobs[start:] if self._wants_logprobs else None
        shown = self._make_completion_output(text, self.token_ids[start:], logprobs)
        self._num_tokens_returned = len(self.token_ids)
        self._end_returned = self.finish_reason is not None
        return shown

    def _visible_text(self, *, new: bool) -> str:
        """The text that may be shown; only what was not, if `new`. Ends the sequence if there is no having it."""
        if self._text is None:
            return ""
        ended = self.finish_reason is not None
        try:
            return self._text.new_text(ended=ended) if new else self._text.full_text(ended=ended)
        except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends of it)
            if not ended:
                self.request.num_unfinished -= 1
                self.request.undecodable_core_ids.append(self.core_id)
            self.fail(e)
            return ""

    def _make_completion_output(
        self, text: str, token_ids: list[int], logprobs: list[PositionLogprobMap] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob if self._wants_sum else None,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.error_parameter,
        )


class _BeamStep:
    """A request for one beam's next token, in the place of a sequence."""

    uses_fast_path = False

    def __init__(self, request: RequestState, core_id: str) -> None:
        self.request = request
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.last_token_time = 0.0


def _beam_to_core_output(beam: Beam) -> EngineCoreOutput:
    """What the engine core would say of a sequence that it had generated by itself."""
    return EngineCoreOutput("", beam.token_ids, beam.finish_reason, beam.stop_reason, beam.positions)


def _best_sequences(shown: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The `n` sequences with the largest sums of log-probabilities, best first; those that failed come last."""
    ranked = sorted(shown, key=lambda each: (each.finish_reason == "error", -(each.cumulative_logprob or 0.0)))[:n]
    for index, each in enumerate(ranked):
        each.index = index
    return ranked


def _to_logprob_map(position: PositionLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobMap:
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
