"""Grammars: a preempted request goes on when the mask of its next token is computed."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.request_lists import RequestLists


class AwaitedMasks(AdmissionPolicy):
    """Passes over requests whose masks are being computed."""

    def start_round(self, requests: RequestLists) -> bool:
        return requests.num_grammars > 0

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.PASS_OVER if candidate.request.awaits_mask else Decision.ADMIT
