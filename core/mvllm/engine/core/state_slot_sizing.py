"""The number of state slots and KV cache blocks of models with sequence states, which share one budget of bytes.

    | working slots: one per running sequence | blocks of all tokens | snapshots: one per `interval` tokens |
    |<-- at most half, unless all fit ------->|<---------------- in a fixed ratio ------------------------->|

With speculative decoding a running sequence has one more working slot for each draft token in flight. Where they do not
fit, its steps have fewer draft tokens. Every sequence of the longest length must fit, with one working slot and two
snapshots. So if states are large, the blocks of one such sequence come first, and the slots get the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.config.engine_config import MIN_SNAPSHOT_TOKENS

MIN_SLOTS = 3
"""One working slot and two snapshots."""

_MOST_SLOTS = 2**24


@dataclass(frozen=True)
class StateNeeds:
    """What states and blocks cost and how many are useful.

    Attributes:
        state_bytes: Bytes of one slot, per worker.
        block_bytes: Bytes of one block, per worker. All are 0 for models without attention, whose blocks only name
            tokens.
        block_size: Tokens per block.
        longest: Blocks of a sequence of the longest length.
        max_num_seqs: Most running sequences.
        interval: Tokens between two snapshots; 0 for none but those at the ends of prompts.
        keeps_prefixes: Finished prefixes are kept for other requests. Otherwise only running sequences need slots.
        num_draft_tokens: Most draft tokens of a sequence in flight.
    """

    state_bytes: Sequence[int]
    block_bytes: Sequence[int]
    block_size: int
    longest: int
    max_num_seqs: int
    interval: int
    keeps_prefixes: bool
    num_draft_tokens: int = 0

    @property
    def min_bytes(self) -> list[int]:
        """Bytes of one sequence of the longest length with its slots, per worker; at least 1."""
        return [
            max(1, self.longest * block + MIN_SLOTS * state)
            for block, state in zip(self.block_bytes, self.state_bytes, strict=True)
        ]


def divide_memory(needs: StateNeeds, available: Sequence[int]) -> tuple[int, int]:
    """The numbers of state slots and of blocks that all workers can hold.

    Args:
        available: Bytes per worker; may be negative.

    Returns:
        Both; fewer than MIN_SLOTS slots or `needs.longest` blocks if the memory does not suffice.
    """
    budget = [max(0, free) for free in available]
    most = needs.max_num_seqs * (1 + needs.num_draft_tokens)
    working = min(most, max(1, _slots_within([free // 2 for free in budget], needs)))
    left = [free - working * state for free, state in zip(budget, needs.state_bytes, strict=True)]
    snapshots = max(MIN_SLOTS - 1, _snapshots_within(left, needs))
    if not needs.keeps_prefixes:
        snapshots = min(snapshots, max(MIN_SLOTS - 1, working))
    slots = min(working + snapshots, _MOST_SLOTS)
    if not any(needs.block_bytes):
        return slots if slots <= _slots_within(budget, needs) else 0, _blocks_that_name_tokens(needs, working, slots)
    blocks = _blocks_within(budget, slots, needs)
    if blocks < needs.longest:
        rest = [free - needs.longest * block for free, block in zip(budget, needs.block_bytes, strict=True)]
        slots = min(slots, _slots_within(rest, needs))
        if slots >= MIN_SLOTS:
            return slots, _blocks_within(budget, slots, needs)
        return MIN_SLOTS, _blocks_within(budget, MIN_SLOTS, needs)
    return slots, blocks


def _slots_within(budget: Sequence[int], needs: StateNeeds) -> int:
    """Slots that fit on every worker without blocks; negative if the budget is."""
    return min((free // state for free, state in zip(budget, needs.state_bytes, strict=True) if state), default=0)


def _blocks_within(budget: Sequence[int], slots: int, needs: StateNeeds) -> int:
    """Blocks that fit on every worker beside these slots; at least 0."""
    fitting = (
        (free - slots * state) // block
        for free, state, block in zip(budget, needs.state_bytes, needs.block_bytes, strict=True)
        if block
    )
    return max(0, min(fitting, default=0))


def _snapshots_within(left: Sequence[int], needs: StateNeeds) -> int:
    """Snapshots that fit on every worker together with the blocks of `interval` tokens each."""
    blocks = -(-max(needs.interval, MIN_SNAPSHOT_TOKENS) // needs.block_size)
    units = (
        max(0, free) // (state + blocks * block)
        for free, state, block in zip(left, needs.state_bytes, needs.block_bytes, strict=True)
        if state
    )
    return min(units, default=0)


def _blocks_that_name_tokens(needs: StateNeeds, working: int, slots: int) -> int:
    """Blocks without memory: those of the longest running sequences, and of `interval` tokens per snapshot."""
    per_snapshot = -(-max(needs.interval, MIN_SNAPSHOT_TOKENS) // needs.block_size)
    rows = min(working, needs.max_num_seqs)
    return min(rows * needs.longest + (slots - working) * per_snapshot, sys.maxsize)
