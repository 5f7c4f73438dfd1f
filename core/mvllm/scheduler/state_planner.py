"""What the plans of models with sequence states need in addition: ends of steps, waiting for snapshots, and slots.

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
        ends_steps: Steps end where a state is kept.
    """

    def __init__(self, states: StateSlots | None, *, can_chunk: bool) -> None:
        self._states = states
        self.is_needed = states is not None
        self.ends_steps = states is not None and can_chunk

    def start_plan(self) -> None:
        """Begins a plan."""
        if self._states is not None:
            self._states.start_plan()

    def end_plan(self, plan: SchedulerOutput, batch: list[Request]) -> None:
        """Adds the state slots to a plan whose rows are complete."""
        if self._states is not None:
            plan.read_slots, plan.write_slots = self._states.assign(
                [request.table for request in batch],
                [request.num_computed_tokens for request in batch],
                plan.draft_token_ids,
            )

    def room(self, request: Request) -> int:
        """Tokens that a running request may compute before its state is kept; 0 if this step has come so far."""
        return request.table.state.next_snapshot - request.num_computed_tokens if self.ends_steps else sys.maxsize

    def choose_snapshots(self, request: Request, num_computed: int) -> int:
        """Chooses where the state of a waiting request is kept. Returns the tokens to the first such position."""
        if self._states is None:
            return sys.maxsize
        self._states.choose_positions(request.table, num_computed)
        return request.table.state.next_snapshot - num_computed if self.ends_steps else sys.maxsize

    def must_wait(self, request: Request, num_cached: int) -> bool:
        """Whether a waiting request should wait until a running one has written a snapshot.

        `still_waits` is then true until that has happened, or cannot happen any more.

        Args:
            num_cached: Tokens of the snapshot that it would start from now.
        """
        states, table = self._states, request.table
        if states is None or not self.ends_steps or not states.has_computing_prompts:
            return False
        if table.root is None or table.state.is_impatient or request.needs_every_position:
            return False
        return states.must_wait(table, num_cached, request.order)

    def still_waits(self, request: Request) -> bool:
        """Whether the snapshot that a request waits for is still to be written."""
        states = self._states
        return states is not None and any(states.still_waits(side.table.state) for side in request.sides)

    def record_start(self, request: Request) -> None:
        """Records that a request starts to run."""
        if self._states is not None:
            self._states.record_prompt(request.table, request.order)

    def draft_budget(self, request: Request, *, others_wait: bool) -> int:
        """The most draft tokens of a request in this step.

        Args:
            others_wait: Requests wait. They need slots, too.
        """
        states, state = self._states, request.table.state
        if states is None:
            return sys.maxsize
        if not states.can_verify(state, num_spare=2 if others_wait else 0):
            return 0
        return state.next_snapshot - request.num_tokens  # the state behind the last draft token may be a snapshot

    def reserve_draft_slot(self, request: Request) -> None:
        """Allocates the slot that a request with draft tokens writes in this step."""
        if self._states is not None:
            self._states.reserve_draft_slot(request.table.state)
