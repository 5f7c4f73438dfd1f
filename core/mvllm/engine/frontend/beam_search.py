"""Beam search: keeps the `num_beams` sequences with the largest sums of log-probabilities at each position.

Beam search sends ordinary one-token requests. A round has one request per beam, whose prompt is the original
prompt and the tokens of the beam. The KV of common prefixes comes from the prefix cache, or, without prefix caching,
from the blocks of the sibling group, so beams share blocks and nothing is copied. The engine core has no beam code:

    round   beams                 requests                         results
    0       []                    prompt                           log-probabilities of the candidate tokens
    1       [a] [b]               prompt a | prompt b              candidates of all beams, sorted by their sums:
    2       [b c] [a d]           prompt b c | prompt a d          finished ones are collected, others become beams

Which candidates finish, their scores and the end of the search are the same as in `generate(num_beams=...)` of
transformers. Each beam requests num_beams + (number of end tokens) candidates: the search can use at most
that many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.messages.requests import EngineCoreOutput, EngineCoreRequest, FinishReason, PositionLogprobs
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True)
class Beam:
    """One candidate sequence of a beam search.

    Attributes:
        token_ids: Generated tokens.
        cumulative_logprob: The sum of their log-probabilities.
        positions: The top log-probabilities at each position, if requested.
        score: The ranking score of a finished beam.
        finish_reason, stop_reason: Of a finished beam, as in EngineCoreOutput.
    """

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    positions: list[PositionLogprobs] = field(default_factory=list)
    score: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


class BeamSearch:
    """Beam search for one prompt.

    Args:
        request: The validated request, with `use_beam_search`.
        ids: Generates the engine-core ids of the beam requests.

    Attributes:
        finished_beams: The best finished sequences, at most `num_beams`, best first.
    """

    def __init__(self, request: EngineCoreRequest, ids: CoreRequestIds) -> None:
        self._request, self._ids = request, ids
        self._params = params = request.sampling_params
        self._width = params.num_beams
        self._max_tokens = params.max_tokens or 1
        eos = [] if params.ignore_eos else request.eos_token_ids
        self._end_tokens = frozenset((*eos, *(params.stop_token_ids or ())))
        self._group = ids.next(request.request_id)
        self._step_params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=-1 if params.logprobs == -1 else max(self._width + len(self._end_tokens), params.logprobs or 0),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._running = [Beam()]
        self._beam_by_request_id: dict[str, int] = {}  # engine-core request id to beam index
        self._logprobs_by_beam: dict[int, PositionLogprobs] = {}
        self.finished_beams: list[Beam] = []

    @property
    def core_ids(self) -> list[str]:
        """Engine-core ids of the current round's requests that have no output yet."""
        return list(self._beam_by_request_id)

    def make_requests(self) -> list[EngineCoreRequest]:
        """Returns the requests of the next round, one per beam."""
        requests = [
            msgspec.structs.replace(
                self._request,
                request_id=self._ids.next(self._request.request_id),
                prompt_token_ids=self._request.prompt_token_ids + beam.token_ids,
                sampling_params=self._step_params,
                eos_token_ids=[],
                sibling_group=self._group,
            )
            for beam in self._running
        ]
        self._beam_by_request_id = {request.request_id: i for i, request in enumerate(requests)}
        return requests

    def record_output(self, output: EngineCoreOutput) -> bool:
        """Records the output of one of the round's requests. Returns whether it was the last one."""
        beam = self._beam_by_request_id.pop(output.request_id)
        if output.logprobs:
            self._logprobs_by_beam[beam] = output.logprobs[0]
        return not self._beam_by_request_id

    def advance(self) -> bool:
        """Ends a round, after its last output. Returns whether the search has ended."""
        length = len(self._running[0].token_ids) + 1
        is_last = length >= self._max_tokens
        may_end = length > self._params.min_tokens
        running: list[Beam] = []
        for index, (beam, rank, token_id) in enumerate(self._candidates(may_end=may_end)):
            ends = token_id in self._end_tokens
            if not (ends or is_last):
                running.append(self._extend_beam(beam, rank, token_id))
            elif index < self._width:  # lower candidates can only become running beams
                self._finish_beam(self._extend_beam(beam, rank, token_id), by_token=ends)
            if len(running) == self._width or (is_last and index >= self._width):
                break
        self.finished_beams = sorted(self.finished_beams, key=lambda beam: -beam.score)[: self._width]
        self._running, self._logprobs_by_beam = running, {}
        return is_last or not running or self._is_finished(length)

    def _candidates(self, *, may_end: bool) -> list[tuple[int, int, int]]:
        """(beam, rank among its candidates, token id) of all candidates, best first."""
        found = [
            (self._running[i].cumulative_logprob + logprob, i, rank, token_id)
            for i, position in sorted(self._logprobs_by_beam.items())
            for rank, (token_id, logprob) in enumerate(
                zip(position.token_ids[1:], position.logprobs[1:], strict=True), start=1
            )
            if may_end or token_id not in self._end_tokens
        ]
        found.sort(key=lambda candidate: -candidate[0])
        return [(i, rank, token_id) for _, i, rank, token_id in found]

    def _extend_beam(self, beam: int, rank: int, token_id: int) -> Beam:
        parent, found = self._running[beam], self._logprobs_by_beam[beam]
        logprob = found.logprobs[rank]
        extended = Beam([*parent.token_ids, token_id], parent.cumulative_logprob + logprob)
        if (num_logprobs := self._params.logprobs) is not None:
            top = slice(1, None if num_logprobs == -1 else 1 + num_logprobs)
            position = PositionLogprobs([token_id, *found.token_ids[top]], [logprob, *found.logprobs[top]], rank)
            extended.positions = [*parent.positions, position]
        return extended

    def _finish_beam(self, beam: Beam, *, by_token: bool) -> None:
        beam.score = beam.cumulative_logprob / len(beam.token_ids) ** self._params.length_penalty
        beam.finish_reason = FinishReason.STOP if by_token else FinishReason.LENGTH
        last = beam.token_ids[-1]
        if by_token and last in (self._params.stop_token_ids or ()):
            beam.stop_reason = last
        self.finished_beams.append(beam)

    def _is_finished(self, length: int) -> bool:
        """Whether `early_stopping` ends the search, with running beams of `length` tokens."""
        params = self._params
        if len(self.finished_beams) < self._width:
            return False
        if params.early_stopping is True:
            return True
        best_length = self._max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best = self._running[0].cumulative_logprob / best_length**params.length_penalty
        return best <= self.finished_beams[-1].score

    def results(self) -> Sequence[Beam]:
        """The best `n` finished sequences, after the search has ended."""
        return self.finished_beams[: self._params.n]
