"""Grammars: a preempted request goes on when the mask of its next token is computed."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision


class Grammars(AdmissionPolicy):
    """Passes over requests whose masks are being computed."""

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.PASS_OVER if candidate.request.awaits_mask else Decision.ADMIT
