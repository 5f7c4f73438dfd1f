"""Without chunked prefill: a prompt is computed in one step."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision


class WholePrompts(AdmissionPolicy):
    """Stops at a request whose tokens do not fit into the rest of the step."""

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.ADMIT if sum(candidate.left) <= candidate.step.budget else Decision.STOP
