"""The state of a request in the front end: tokens, text and log-probabilities of its sequences.

One `GeneratedSequence` per sequence collects the engine core's outputs. The `RequestState` owns the `n` sequences and
makes a `RequestOutput` on demand. Text is decoded only then, unless the request has stop strings. Core outputs
accumulate until the next `RequestOutput`, which contains all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mvllm.engine.frontend.beam_search import BeamSearch
from mvllm.engine.frontend.flat_logprobs import FlatLogprobs
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.outputs import CompletionOutput, Logprob, PositionLogprobMap, RequestMetrics, RequestOutput
from mvllm.engine.frontend.sequence_detokenizer import LazyDetokenizer, make_sequence_detokenizer
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import EngineDeadError
from mvllm.messages.pooling_params import PoolingType
from mvllm.messages.requests import EngineCoreOutput, FinishReason, PositionLogprobs
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.structured_output.output_validator import TextToValidate
from mvllm.structured_output.schema_rewriting import is_annotation

_STOP = str(FinishReason.STOP)


class OutputListener(Protocol):
    """The iterator over a request's outputs: a RequestOutputStream."""

    def notify(self) -> None:
        """New output is there, or the request has ended."""

    def fail(self, error: EngineDeadError) -> None:
        """Ends the iterator with an error."""


class RequestState:
    """A caller's request: its sequences, its metrics, and the outputs that its caller has received.

    Attributes:
        request_id: The caller's id.
        params: As validated; `n` may be larger than 1.
        sequences: One per sequence of the output.
        num_unfinished: Number of sequences that have not ended.
        num_sequences: Number of sequences that the engine core may run at the same time.
        has_new_output: Whether `make_request_output` may return something new.
        undecodable_core_ids: Core ids of running sequences whose tokens could not be turned into text; the
            OutputProcessor ends them (`finish_undecodable`).
        is_tracked: Whether the OutputProcessor still tracks the request.
        stream: The iterator to notify of new output; None in an LLMEngine.
        item_lease: The memory of the prompt's items, released when the request ends; None without.
        final_only: Whether there is no output before the end.
        is_pooling: Whether it is a pooling request, which generates no tokens.
        priority_class: `high` for a priority below 0, `low` for one above; None for 0.
        search: The beam search that finds the sequences, if the request asks for one.
        metrics: Times of the request's events.
        space: The space of its output tokens; None for text.
        has_pair: Whether it has a companion (`RequestPair`).
    """

    def __init__(
        self,
        request: ProcessedRequest,
        tokenizer: Tokenizer | None,
        core_ids: Sequence[str],
        search: BeamSearch | None = None,
    ) -> None:
        params, core = request.params, request.core
        self.request_id = core.request_id
        self.params = params
        self.is_ranked = params.is_ranked
        self.kind = RequestOutputKind.FINAL_ONLY if self.is_ranked else params.output_kind
        self.final_only = self.kind == RequestOutputKind.FINAL_ONLY
        if search is not None:
            core_ids = [""] * params.n  # its requests are BeamRequests
        self._prompt_token_ids = core.prompt_token_ids
        self.has_pair = request.core.pair is not None
        self.sequences = [GeneratedSequence(self, index, core_id, tokenizer) for index, core_id in enumerate(core_ids)]
        self.num_unfinished = len(self.sequences)
        self.num_sequences = params.num_sequences
        self.priority_class = ("high" if core.priority < 0 else "low") if core.priority else None
        self.search = search
        self.stream: OutputListener | None = None
        self.item_lease = request.item_lease
        self.is_tracked = True
        self.has_new_output = False
        self.undecodable_core_ids: list[str] = []
        pooling = core.pooling_params
        self.is_pooling = pooling is not None
        self._pools_each_token = pooling is not None and pooling.pooling_type is PoolingType.ALL
        self._prompt = request.prompt
        self._tokenizer = tokenizer if params.detokenize else None
        self._returns_prompt_logprobs = params.prompt_logprobs is not None
        self._flattens_logprobs = params.flat_logprobs
        self._prompt_logprobs: Sequence[PositionLogprobMap | None] | None = None
        self._prompt_logprobs_returned = False
        self._num_cached_tokens: int | None = None
        self._pooling_output: bytes | None = None
        self._lora_request = core.lora_request
        self._kv_transfer_params: dict[str, Any] | None = None
        self._relaxations: tuple[str, ...] = ()
        self._validated: dict[int, CompletionOutput] = {}
        self.space = request.space
        self.metrics = RequestMetrics(arrival_time=core.arrival_time)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt_token_ids)

    @property
    def core_ids(self) -> list[str]:
        """Ids in the engine core of the sequences, ended ones included, or of a beam search's current round."""
        return [sequence.core_id for sequence in self.sequences] if self.search is None else self.search.core_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV came from the prefix cache."""
        return self._num_cached_tokens or 0

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens of all sequences so far."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def update_from_output(self, output: EngineCoreOutput, now: float) -> None:
        """Records the fields of an output that belong to the request, not to a sequence."""
        metrics = self.metrics
        if output.new_token_ids and metrics.first_token_time is None:
            metrics.first_token_time = output.first_token_time or now
        if self._num_cached_tokens is None:
            # Of the first sequence alone: the others find the prompt in the cache because of it.
            self._num_cached_tokens = output.num_cached_tokens
            metrics.first_scheduled_time = output.scheduled_time or None
        if output.prompt_logprobs is not None and self._returns_prompt_logprobs:
            found = [None, *(_to_logprob_map(p, self._tokenizer) for p in output.prompt_logprobs)]
            self._prompt_logprobs = _flattened(found) if self._flattens_logprobs else found
        if output.pooling_output is not None:
            self._pooling_output = output.pooling_output
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if output.relaxations:
            self._relaxations = output.relaxations

    def fail_beam_search(self, failure: EngineCoreOutput, now: float) -> None:
        """Ends all sequences with the finish reason and error of an output."""
        end = EngineCoreOutput(
            "", [], failure.finish_reason, error=failure.error, error_parameter=failure.error_parameter
        )
        self._finish_sequences([end] * len(self.sequences), now)

    def finish_beam_search(self, now: float) -> None:
        """Fills the sequences with the results of the beam search."""
        assert self.search is not None
        beams = self.search.results()
        ends = [
            EngineCoreOutput("", beam.token_ids, beam.finish_reason, beam.stop_reason, beam.positions) for beam in beams
        ]
        if not ends:
            error = "no sequence can end: every candidate token is an end token, which min_tokens forbids"
            ends = [EngineCoreOutput("", [], FinishReason.ERROR, error=error)]
        del self.sequences[len(ends) :]
        self._finish_sequences(ends, now)
        for sequence, beam in zip(self.sequences, beams, strict=False):
            sequence.cumulative_logprob = beam.cumulative_logprob

    def _finish_sequences(self, ends: Sequence[EngineCoreOutput], now: float) -> None:
        for sequence, end in zip(self.sequences, ends, strict=True):
            sequence.last_token_time = now
            try:
                sequence.append_output(end)
            except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends)
                sequence.fail(e)
        self.num_unfinished = 0

    def make_request_output(self) -> RequestOutput | None:
        """The next output for the caller: everything so far, or everything since the last one, as `kind` says.

        Returns None if there is no output to give yet. Sequences that cannot be decoded are added to
        `undecodable_core_ids`.
        """
        self.has_new_output = False
        sequences = self.sequences
        if self.final_only:
            if self.num_unfinished:
                return None
            outputs = [sequence.make_full_output() for sequence in sequences]
            if self.is_ranked and self.search is None:
                outputs = _best_sequences(outputs, self.params.n)
        elif self.kind == RequestOutputKind.DELTA:
            outputs = [sequence.make_delta_output() for sequence in sequences if sequence.has_new_output]
        else:
            outputs = [sequence.make_full_output() for sequence in sequences]
        finished = self.num_unfinished == 0  # read here: a sequence that cannot be decoded has ended above
        if not outputs and not finished:
            return None
        last = sequences[0].last_token_time if len(sequences) == 1 else max(each.last_token_time for each in sequences)
        self.metrics.last_token_time = last or None
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            self._next_prompt_logprobs(),
            outputs,
            finished,
            self.metrics.snapshot(),
            self._num_cached_tokens or 0,
            self._pooling_output,
            self._pools_each_token,
            self._lora_request,
            self._kv_transfer_params,
            self._relaxations,
        )

    def texts_to_validate(self, output: RequestOutput) -> list[tuple[CompletionOutput, TextToValidate]]:
        """The sequences that an output ends and whose schema was not enforced whole, with what is to be validated."""
        constraint = self.params.structured_outputs
        if not isinstance(constraint, StructuredOutputsParams) or all(map(is_annotation, self._relaxations)):
            return []
        jobs = []
        for sequence in output.outputs:
            if sequence.finish_reason != _STOP:
                continue
            before = self._validated.get(sequence.index)
            if before is not None and before.warnings is not None:
                sequence.warnings = before.warnings
                continue
            self._validated[sequence.index] = sequence
            text, token_ids = sequence.text, sequence.token_ids
            is_delta = self.kind == RequestOutputKind.DELTA
            # With the end of the thoughts and the beginnings of calls, special tokens or not.
            if is_delta or constraint.thoughts_end is not None or constraint.form == "structural_tag":
                token_ids = self.sequences[sequence.index].token_ids if is_delta else token_ids
                text = self._tokenizer.decode(token_ids, skip_special_tokens=False) if self._tokenizer else ""
            jobs.append((sequence, TextToValidate.of(constraint, text, self._relaxations)))
        return jobs

    def _next_prompt_logprobs(self) -> Sequence[PositionLogprobMap | None] | None:
        """The prompt's log-probabilities; in the first output only, if the kind is DELTA."""
        if self.kind == RequestOutputKind.DELTA and self._prompt_logprobs_returned:
            return None
        self._prompt_logprobs_returned = self._prompt_logprobs is not None
        if self._prompt_logprobs is None and self._returns_prompt_logprobs and len(self._prompt_token_ids) == 1:
            return [None]  # a prompt of one token has no predicted position, so the engine core sends nothing
        return self._prompt_logprobs


class GeneratedSequence:
    """One sequence of a request: its tokens, its text, and whether it has ended.

    Attributes:
        core_id: Its id in the engine core.
        last_token_time: Monotonic time of its newest output; 0.0 before the first.
        uses_fast_path: Whether an output with tokens alone needs nothing but `token_ids += new`.
        weight_version: Version of the weights that sampled the newest tokens.
    """

    def __init__(self, request: RequestState, index: int, core_id: str, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_parameter: str | None = None
        self.last_token_time = 0.0
        self.cumulative_logprob = 0.0
        self._tokenizer = tokenizer if params.detokenize else None
        self._returns_logprobs = params.logprobs is not None
        self._sums_logprobs = self._returns_logprobs or params.is_ranked
        self._logprobs: list[PositionLogprobMap] | FlatLogprobs = FlatLogprobs() if params.flat_logprobs else []
        self._conditional_logprobs: list[float] | None = [] if self._returns_logprobs and request.has_pair else None
        self._text = make_sequence_detokenizer(
            params, self._tokenizer, request.final_only, self.token_ids, request._prompt_token_ids
        )
        self.uses_fast_path = not self._sums_logprobs and (
            self._text is None or isinstance(self._text, LazyDetokenizer)
        )
        self._num_tokens_returned = 0
        self._end_returned = False
        self.weight_version = 0
        self._older_versions: list[tuple[int, int]] = []  # (version, number of tokens)

    def append_output(self, output: EngineCoreOutput) -> None:
        """Appends new tokens, and records whether the core has ended the sequence or a stop string ends it here."""
        new = output.new_token_ids
        ended = output.finish_reason
        if self._text is not None:
            num_used, stop = self._text.append(new, len(self.token_ids), ended)
            if stop is not None:
                self.finish_reason, self.stop_reason = _STOP, stop
                new = new[:num_used]
        if output.weight_versions:  # of a request whose tokens all come at its end
            self._older_versions = [(version, count) for version, count in output.weight_versions]
        self.token_ids += new
        if self._sums_logprobs and output.logprobs:
            for position in output.logprobs[: len(new)]:
                if self._returns_logprobs:
                    self._logprobs.append(_to_logprob_map(position, self._tokenizer))
                self.cumulative_logprob += position.logprobs[0]
        if self._conditional_logprobs is not None and output.conditional_logprobs:
            self._conditional_logprobs += output.conditional_logprobs[: len(new)]
        if ended is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = str(ended), output.stop_reason, output.error
            self.error_parameter = output.error_parameter

    def set_weight_version(self, version: int) -> None:
        """The following tokens are sampled with weights of another version."""
        count = len(self.token_ids) - sum(count for _, count in self._older_versions)
        if count:
            self._older_versions.append((self.weight_version, count))
        self.weight_version = version

    def _versions_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The versions of the tokens from `start` to `stop`, with the number of tokens of each."""
        if self.request.search is not None or start == stop:
            return []
        if not self._older_versions:
            return [(self.weight_version, stop - start)]
        versions, first = [], 0
        for version, count in [*self._older_versions, (self.weight_version, stop)]:
            covered = min(first + count, stop) - max(first, start)
            if covered > 0:
                versions.append((version, covered))
            first += count
        return versions

    def fail(self, error: Exception) -> None:
        """Ends the sequence because its tokens cannot be turned into text."""
        self._text = None
        self.finish_reason, self.stop_reason = str(FinishReason.ERROR), None
        self.error = f"The tokenizer cannot turn the output into text: {type(error).__name__}: {error}"

    @property
    def has_new_output(self) -> bool:
        """Whether `make_delta_output` has anything new to return."""
        return len(self.token_ids) > self._num_tokens_returned or (
            self.finish_reason is not None and not self._end_returned
        )

    def make_full_output(self) -> CompletionOutput:
        """Everything so far. Later steps do not change a returned output."""
        text = self._decode(new=False)
        logprobs = self._logprobs[:] if self._returns_logprobs else None
        return self._make_completion_output(text, 0, logprobs)

    def make_delta_output(self) -> CompletionOutput:
        """Everything since the last call."""
        text = self._decode(new=True)
        start = self._num_tokens_returned
        logprobs = self._logprobs[start:] if self._returns_logprobs else None
        output = self._make_completion_output(text, start, logprobs)
        self._num_tokens_returned = len(self.token_ids)
        self._end_returned = self.finish_reason is not None
        return output

    def _decode(self, *, new: bool) -> str:
        """The text without a possible beginning of a stop string; with `new`, the part not returned before.

        A tokenizer that raises ends the sequence.
        """
        if self._text is None:
            return ""
        ended = self.finish_reason is not None
        try:
            return self._text.new_text(ended=ended) if new else self._text.full_text(ended=ended)
        except Exception as e:  # noqa: BLE001  (a tokenizer may raise anything; only this sequence ends)
            if not ended:
                self.request.num_unfinished -= 1
                self.request.undecodable_core_ids.append(self.core_id)
            self.fail(e)
            return ""

    def _make_completion_output(
        self, text: str, start: int, logprobs: list[PositionLogprobMap] | FlatLogprobs | None
    ) -> CompletionOutput:
        """The output with the tokens from `start` on."""
        token_ids, space, conditional = self.token_ids[start:], self.request.space, self._conditional_logprobs
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob if self._sums_logprobs else None,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.error_parameter,
            self._versions_of(start, len(self.token_ids)),
            None if space is None else space.codes_of(token_ids),
            None if conditional is None else conditional[start:],
        )


class BeamRequest:
    """A request for one beam's next token, in place of a GeneratedSequence."""

    uses_fast_path = False

    def __init__(self, request: RequestState, core_id: str) -> None:
        assert request.search is not None
        self.request = request
        self.search = request.search
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.last_token_time = 0.0


def _best_sequences(outputs: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The `n` sequences with the largest sums of log-probabilities, best first; those that failed come last."""
    ranked = sorted(outputs, key=lambda each: (each.finish_reason == "error", -(each.cumulative_logprob or 0.0)))[:n]
    for index, each in enumerate(ranked):
        each.index = index
    return ranked


def _to_logprob_map(position: PositionLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobMap:
    """Token id to log-probability: the token at the position, then the most probable ones by rising rank."""
    token_ids, logprobs = position.token_ids, position.logprobs
    text = tokenizer.token_text if tokenizer is not None else _no_text
    first = token_ids[0]
    result = {first: Logprob(logprobs[0], position.rank, text(first))}
    if len(token_ids) == 1:
        return result
    for rank, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:], strict=True), start=1):
        if token_id != first:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result


def _flattened(positions: Sequence[PositionLogprobMap | None]) -> FlatLogprobs:
    found = FlatLogprobs()
    for position in positions:
        found.append(position)
    return found


def _no_text(token_id: int) -> None:
    return None
