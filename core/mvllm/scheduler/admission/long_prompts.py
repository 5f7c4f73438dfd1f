"""Long prompts: one after the other, each with a share of the step, see `long_prefill_limiter.py`; or in one step."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter


class LongPromptTurns(AdmissionPolicy):
    """Passes over prompts known to be long while another one is computed, without a look at the prefix cache."""

    def __init__(self, limiter: LongPrefillLimiter) -> None:
        self._limiter = limiter

    def decide(self, candidate: Candidate) -> Decision:
        waits = candidate.request.is_long and not self._limiter.has_room
        return Decision.PASS_OVER if waits else Decision.ADMIT


class LongPromptShares(AdmissionPolicy):
    """Gives a prompt its share of the step, and passes over long ones that get nothing."""

    def __init__(self, limiter: LongPrefillLimiter) -> None:
        self._limiter = limiter

    def decide(self, candidate: Candidate) -> Decision:
        total = sum(candidate.left)
        candidate.share = self._limiter.share(total, is_very_long=self._limiter.is_very_long(total))
        return Decision.ADMIT if candidate.share.num_tokens else Decision.PASS_OVER

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        request = candidate.request
        request.is_long = not candidate.share.num_tokens
        request.is_very_long = candidate.share.is_very_long
        self._limiter.take(candidate.share)


class WholePrompts(AdmissionPolicy):
    """Without chunked prefill: stops at a request whose tokens do not fit into the rest of the step."""

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.ADMIT if sum(candidate.left) <= candidate.step.budget else Decision.STOP
