"""Admission of requests with LoRA adapters: at most `max_loras` different adapters run, and no request waits forever.

Strict service order would leave the batch nearly empty when requests of different adapters alternate. So a request
whose adapter is already in use bypasses the requests that wait for a slot, at most `max_bypasses` times for the first
of those. After that, no request with an adapter is admitted before it; a slot becomes free when the last running
request of an adapter finishes. Requests without an adapter need no slot.
"""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.scheduler.request import Request


class LoRAAdmission:
    """Decides which requests with adapters are admitted.

    Args:
        max_loras: Most different adapters at a time; 0 without LoRA.
        max_bypasses: How many requests may bypass the first one that waits for a slot.

    Attributes:
        max_loras: Most different adapters at a time; 0 without LoRA.
    """

    def __init__(self, max_loras: int, *, max_bypasses: int) -> None:
        self.max_loras = max_loras
        self._max_bypasses = max_bypasses
        self._running: set[int] = set()
        self._first_waiting: Request | None = None  # the first request in service order that waits for a slot
        self._num_bypasses = 0
        self._first_waiting_in_round: Request | None = None

    def start_round(self, running: Iterable[int]) -> None:
        """Begins a scheduling step, in which `can_admit` is called for requests in service order.

        Args:
            running: `lora_int_id` of each running request; 0 for none.
        """
        self._running = {lora_int_id for lora_int_id in running if lora_int_id}
        self._first_waiting_in_round = None

    def can_admit(self, request: Request) -> bool:
        """Whether a request with an adapter may run now."""
        has_slot = request.lora_int_id in self._running or len(self._running) < self.max_loras
        if self._first_waiting_in_round is None:
            if has_slot:
                return True
            self._first_waiting_in_round = request
            if self._first_waiting is not request:
                self._first_waiting, self._num_bypasses = request, 0
            return False
        return has_slot and self._num_bypasses < self._max_bypasses

    def record_admission(self, request: Request) -> None:
        """Records that a request with an adapter was admitted."""
        self._running.add(request.lora_int_id)
        if self._first_waiting_in_round is not None:
            self._num_bypasses += 1
