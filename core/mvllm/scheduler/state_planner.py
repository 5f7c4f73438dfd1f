"""What the plans of models with sequence states need in addition: ends of steps, and slots.

See `kv_cache/state_slots.py`. In other models the methods change nothing.
"""

from __future__ import annotations

import sys

from mvllm.kv_cache.state_slots import StateSlots
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request


class StatePlanner:
    """Applies the rules of StateSlots to requests.

    Args:
        states: The state slots; None in models without sequence states.
        can_chunk: Prompts can be computed over several steps. Otherwise no step ends at a snapshot on purpose.

    Attributes:
        is_needed: The model has sequence states.
    """

    def __init__(self, states: StateSlots | None, *, can_chunk: bool) -> None:
        self._states = states
        self.is_needed = states is not None
        self._ends_steps = states is not None and can_chunk

    def start_plan(self) -> None:
        """Begins a plan."""
        if self._states is not None:
            self._states.start_plan()

    def end_plan(self, plan: SchedulerOutput, batch: list[Request]) -> None:
        """Adds the state slots to a plan whose rows are complete."""
        if self._states is not None:
            plan.read_slots, plan.write_slots = self._states.assign(
                [request.table for request in batch], [request.num_computed_tokens for request in batch]
            )
            if plan.draft_token_ids:
                plan.draft_slots = {
                    position: batch[position].table.state.draft_slots for position in plan.draft_token_ids
                }

    def room(self, request: Request, start: int) -> int:
        """Tokens that a running request may compute from `start` on before its state is kept; may be 0."""
        return request.table.state.next_snapshot - start if self._ends_steps else sys.maxsize

    def draft_budget(self, request: Request, *, others_wait: bool) -> int:
        """The most draft tokens of a request in this step.

        Args:
            others_wait: Requests wait. They need slots, too.
        """
        states, state = self._states, request.table.state
        if states is None:
            return sys.maxsize
        # The state behind the last draft token may be a snapshot.
        room = state.next_snapshot - request.max_num_tokens_in_flight
        return min(room, states.num_verifiable(num_spare=2 if others_wait else 0))

    def may_reach_snapshot(self, request: Request) -> bool:
        """Whether the next step of a request with draft tokens in flight may come to a position where its state is
        kept."""
        return self._states is not None and request.max_num_tokens_in_flight >= request.table.state.next_snapshot

    def reserve_draft_slots(self, request: Request, count: int) -> None:
        """Allocates the slots behind each of the draft tokens of a request in this step."""
        if self._states is not None:
            self._states.reserve_draft_slots(request.table.state, count)
