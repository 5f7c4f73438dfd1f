"""Sequence states: a request waits for the snapshot of another one that computes the same tokens.

See `kv_cache/state_slots.py`. These policies are for models with sequence states.
"""

from __future__ import annotations

from mvllm.kv_cache.state_slots import SnapshotOffers, StateSlots
from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.request import Request


class AwaitedSnapshots(AdmissionPolicy):
    """Passes over requests whose snapshot is still to be written."""

    def __init__(self, states: StateSlots) -> None:
        self._states = states

    def decide(self, candidate: Candidate) -> Decision:
        waits = any(self._states.still_waits(side.table.state) for side in candidate.sides)
        return Decision.PASS_OVER if waits else Decision.ADMIT

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        for side in candidate.sides:
            self._states.update_wait(side.table.state)
            if side.table.state.awaited is not None:
                return


class SharedPrefixes(AdmissionPolicy):
    """Passes over requests that can start later from a snapshot, and chooses the snapshots of those that start.

    Args:
        states: The state slots.
        can_chunk: Prompts can be computed over several steps. Otherwise no step ends at a snapshot on purpose.
    """

    def __init__(self, states: StateSlots, *, can_chunk: bool) -> None:
        self._states = states
        self._can_chunk = can_chunk

    def decide(self, candidate: Candidate) -> Decision:
        found: list[SnapshotOffers | None] = []
        candidate.offers = found
        for side, start, prefix in zip(candidate.sides, candidate.starts, candidate.prefixes, strict=True):
            offers = None
            if self._may_wait(side):
                offers = self._states.find_offers(side.table, start, side.order, prefix.num_shared_tokens)
            found.append(offers)
            if offers is not None and offers.wanted:
                return Decision.PASS_OVER
        candidate.ends_at_snapshots = self._can_chunk
        return Decision.ADMIT

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        for side, offers in zip(candidate.sides, candidate.offers):  # none to the sides after one that waits
            if offers is not None:
                self._states.forget_computed_prompts(offers)
                if offers.wanted:
                    self._states.wait_for(side.table, offers)
        if decision is Decision.ADMIT:
            for side, start, end in zip(candidate.sides, candidate.starts, candidate.shared_ends, strict=True):
                self._states.choose_positions(side.table, start, end)
                self._states.record_prompt(side.table, side.order)

    def _may_wait(self, side: Request) -> bool:
        """Whether a side may wait for a snapshot."""
        if not self._can_chunk or not self._states.has_computing_prompts:
            return False
        return not (side.table.root is None or side.needs_every_position or self._states.is_impatient(side.table.state))
