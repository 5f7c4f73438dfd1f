"""Images, audio and embeddings: a request starts if the items of its first tokens can be encoded."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.request_lists import RequestLists


class Encoders(AdmissionPolicy):
    """Ends the first tokens of a request before an item for which there is no room, or stops at the request.

    Args:
        encoders: Plans encoder runs.
        can_chunk: Prompts can be computed over several steps.
    """

    def __init__(self, encoders: EncoderPlanner, *, can_chunk: bool) -> None:
        self._encoders = encoders
        self._can_chunk = can_chunk

    def start_round(self, requests: RequestLists) -> bool:
        return requests.num_with_items > 0

    def decide(self, candidate: Candidate) -> Decision:
        request = candidate.request
        if not request.items:
            return Decision.ADMIT
        [start], [left], [count] = candidate.starts, candidate.left, candidate.counts
        count = self._encoders.limit(request, start, count, candidate.step.budget)
        candidate.counts = [count]
        return Decision.ADMIT if count and (count == left or self._can_chunk) else Decision.STOP

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        if decision is Decision.ADMIT and candidate.request.items:
            [start], [count] = candidate.starts, candidate.counts
            self._encoders.reserve(candidate.request, start, start + count, candidate.step.plan)
