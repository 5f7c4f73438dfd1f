"""LoRA slots: at most `max_loras` different adapters run, and no request waits forever.

Strict service order would leave the batch nearly empty when requests of different adapters alternate. So a request
whose adapter is already in use bypasses the requests that wait for a slot, at most `max_bypasses` times for the first
of those. After that, no request with an adapter is admitted before it; a slot becomes free when the last running
request of an adapter finishes. Requests without an adapter need no slot.
"""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists


class LoRASlots(AdmissionPolicy):
    """Passes over requests whose adapter has no slot.

    Args:
        max_loras: Most different adapters at a time.
        max_bypasses: How many requests may bypass the first one that waits for a slot.
    """

    def __init__(self, max_loras: int, *, max_bypasses: int) -> None:
        self._max_loras = max_loras
        self._max_bypasses = max_bypasses
        self._running: set[int] = set()
        self._first_waiting: Request | None = None  # the first request in service order that waits for a slot
        self._num_bypasses = 0
        self._first_waiting_in_round: Request | None = None

    def start_round(self, requests: RequestLists) -> bool:
        self._running = {request.lora_int_id for request in requests.running if request.lora_int_id}
        self._first_waiting_in_round = None
        return True

    def decide(self, candidate: Candidate) -> Decision:
        lora_int_id = candidate.request.lora_int_id
        if not lora_int_id:
            return Decision.ADMIT
        may_run = lora_int_id in self._running or len(self._running) < self._max_loras
        if self._first_waiting_in_round is not None:
            may_run = may_run and self._num_bypasses < self._max_bypasses
        return Decision.ADMIT if may_run else Decision.PASS_OVER

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        request = candidate.request
        if not request.lora_int_id:
            return
        if decision is Decision.ADMIT:
            self._running.add(request.lora_int_id)
            self._num_bypasses += self._first_waiting_in_round is not None
        elif candidate.decided_by is self and self._first_waiting_in_round is None:
            self._first_waiting_in_round = request
            if self._first_waiting is not request:
                self._first_waiting, self._num_bypasses = request, 0
