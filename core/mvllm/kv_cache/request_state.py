"""The state slots of one request in models with sequence states."""

from __future__ import annotations

import sys

NO_POSITION = sys.maxsize
"""A position that no sequence reaches."""


class RequestState:
    """The state slots of one request, or none. Created by the KVCacheManager and changed only by its StateSlots.

        position          0 .................... 512 ............. 640
        source            -1 (zeros)             slot 7, kept      slot 2
        slot              7                      2                 2

    Attributes:
        slot: The slot that its next step writes; -1 if it holds none.
        source: The slot that its next step reads: `slot`, or one with a snapshot, or -1 for zeros.
        position: Tokens that the state in `source` has consumed.
        next_snapshot: The next position at which its state is kept. No step goes beyond it.
        prompt_snapshots: Such positions that are no multiples of the interval, in ascending order.
        draft_slot: The slot that a step with draft tokens writes, if that is not `slot`; otherwise -1.
        pending: Snapshots without a hash: their position, and their slot.
        num_prompt_tokens: Length of the prompt.
        has_siblings: Other requests have the same prompt.
        shared_end: Leading tokens that cached blocks, or the prompts of running requests, have in common with it.
        order: Its place in the service order while it computes its prompt.
        awaited: The request whose snapshot it waits for, how often that one had started, and the position.
        num_starts: How often it has got a slot.
    """

    __slots__ = (
        "awaited",
        "draft_slot",
        "has_siblings",
        "next_snapshot",
        "num_prompt_tokens",
        "num_starts",
        "order",
        "pending",
        "position",
        "prompt_snapshots",
        "shared_end",
        "slot",
        "source",
    )

    def __init__(self, num_prompt_tokens: int, *, has_siblings: bool) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.has_siblings = has_siblings
        self.slot = self.source = self.draft_slot = -1
        self.position = 0
        self.next_snapshot = NO_POSITION
        self.prompt_snapshots: list[int] = []
        self.pending: list[tuple[int, int]] = []
        self.shared_end = 0
        self.order = (0, 0)
        self.awaited: tuple[RequestState, int, int] | None = None
        self.num_starts = 0

    @property
    def held(self) -> list[int]:
        """The slots that it uses, each as often as it is counted."""
        slots = [slot for slot in (self.slot, self.draft_slot) if slot >= 0]
        if self.source >= 0 and self.source != self.slot:
            slots.append(self.source)
        return slots + [slot for _, slot in self.pending]
