"""Whose adapter may run: at most so many different ones at a time, and none waits forever.

Serving requests strictly in order would leave the batch nearly empty where those of different adapters alternate. So
requests of adapters that run already pass those that have to wait for a slot; but only so many pass the one that has
waited longest. When these are used up nobody with an adapter joins before it does: those that run come to their ends,
and with the last of an adapter a slot becomes free. Requests without an adapter hold no slot, and always pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.scheduler.request import Request


class LoRAAdmission:
    """Decides which adapters run.

    Args:
        max_loras: Most different adapters at a time; 0 where there are none.
        max_bypasses: How many requests may pass the first one that waits for a slot.

    Attributes:
        max_loras: As given.
    """

    def __init__(self, max_loras: int, *, max_bypasses: int) -> None:
        self.max_loras = max_loras
        self._max_bypasses = max_bypasses
        self._running: set[int] = set()
        self._first: Request | None = None  # that waits for a slot, in the order of service
        self._num_bypasses = 0
        self._first_in_round: Request | None = None

    def start_round(self, running: Iterable[int]) -> None:
        """Begins a round: requests are asked about in the order in which they are to be served.

        Args:
            running: The adapters of the requests that run; 0 for none.
        """
        self._running = {lora_int_id for lora_int_id in running if lora_int_id}
        self._first_in_round = None

    def can_admit(self, request: Request) -> bool:
        """Whether a request with an adapter may run beside the others."""
        has_slot = request.lora_int_id in self._running or len(self._running) < self.max_loras
        if self._first_in_round is None:
            if has_slot:
                return True
            self._first_in_round = request
            if self._first is not request:
                self._first, self._num_bypasses = request, 0
            return False
        return has_slot and self._num_bypasses < self._max_bypasses

    def record_admission(self, request: Request) -> None:
        """A request that may join runs from now on."""
        self._running.add(request.lora_int_id)
        if self._first_in_round is not None:
            self._num_bypasses += 1
