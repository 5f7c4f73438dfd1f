"""Request pairs: both sides start in the same step (see `request_pairs.py`)."""

from __future__ import annotations

from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.request_lists import RequestLists, RowAllocator


class PairRows(AdmissionPolicy):
    """Stops at a request pair for which there are not two rows."""

    def __init__(self, rows: RowAllocator) -> None:
        self._rows = rows

    def start_round(self, requests: RequestLists) -> bool:
        return requests.num_pairs > 0

    def decide(self, candidate: Candidate) -> Decision:
        return Decision.ADMIT if len(candidate.sides) <= self._rows.num_free else Decision.STOP
