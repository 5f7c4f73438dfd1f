"""The state slots of one request in models with sequence states."""

from __future__ import annotations

import sys

NO_POSITION = sys.maxsize
"""A position that no sequence reaches."""


class AwaitedSnapshot:
    """A snapshot that a running request is going to write.

    Attributes:
        writer: That request.
        num_starts: How often it had got a slot: it may be preempted and start again.
        position: Where it leaves the snapshot.
        seen: Its position when it was last seen to advance.
        plan: The plan in which that was seen.
    """

    __slots__ = ("num_starts", "plan", "position", "seen", "writer")

    def __init__(self, writer: RequestStateSlots, position: int, plan: int) -> None:
        self.writer = writer
        self.num_starts = writer.num_starts
        self.position = position
        self.seen = writer.position
        self.plan = plan


class RequestStateSlots:
    """The state slots of one request, or none. Changed only by StateSlots.

        tokens      0 .................. 512 ............. 640          the next step reads slot 2 and writes it;
        state       zeros                in slot 7         in slot 2    slot 7 is a snapshot, which nobody writes

    Attributes:
        slot: The slot that its next step writes; -1 if it holds none. No other request reads it.
        source: The slot that its next step reads: `slot`, or one with a snapshot, or -1 for zeros.
        position: Tokens that the state in `source` has consumed, after the plans made so far.
        next_snapshot: The next position at which its state is kept. Steps end there.
        prompt_snapshots: Positions to keep besides the multiples of the interval, in ascending order.
        draft_slots: The slots behind each draft token of its last step, if that is in flight.
        older_draft_slots: Those of each step in flight before that one, the oldest first.
        planned_draft_slots: Those of the step that is being planned.
        pending: Snapshots that have no hash yet: position and slot.
        num_prompt_tokens: Length of the prompt.
        has_siblings: Other requests have the same prompt.
        order: Its place in the service order, while it runs.
        num_starts: How often it has got a slot.
        awaited: The snapshot that it waits for, if it does.
        is_impatient: The snapshot that it waited for came too late, so it waits for no other one until it starts.
    """

    __slots__ = (
        "awaited",
        "draft_slots",
        "has_siblings",
        "is_impatient",
        "next_snapshot",
        "num_prompt_tokens",
        "num_starts",
        "older_draft_slots",
        "order",
        "pending",
        "planned_draft_slots",
        "position",
        "prompt_snapshots",
        "slot",
        "source",
    )

    def __init__(self, num_prompt_tokens: int, *, has_siblings: bool) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.has_siblings = has_siblings
        self.slot = self.source = -1
        self.draft_slots: list[int] = []
        self.older_draft_slots: list[list[int]] = []
        self.planned_draft_slots: list[int] = []
        self.position = 0
        self.next_snapshot = NO_POSITION
        self.prompt_snapshots: list[int] = []
        self.pending: list[tuple[int, int]] = []
        self.order = (0, 0)
        self.num_starts = 0
        self.awaited: AwaitedSnapshot | None = None
        self.is_impatient = False

    @property
    def written(self) -> list[int]:
        """The slots that no other request reads: `slot` and those of draft tokens."""
        return [self.slot, *self.draft_slots, *(slot for slots in self.older_draft_slots for slot in slots)]

    @property
    def held(self) -> list[int]:
        """The slots that it uses, each as often as it counts as a user of it."""
        slots = [slot for slot in self.written if slot >= 0]
        if self.source >= 0 and self.source != self.slot:
            slots.append(self.source)
        return slots + [slot for _, slot in self.pending]


NO_STATE = RequestStateSlots(0, has_siblings=False)
"""Of requests to models without sequence states. Never changed."""
