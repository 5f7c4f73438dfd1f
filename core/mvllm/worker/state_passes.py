"""The passes of a step with draft tokens over the layers with a sequence state.

Such a layer leaves a state behind the known tokens of each row and behind each of its draft tokens, in a slot each. So
it runs one pass over the known tokens of all rows, then one over the first draft token of each row that has one, and so
on. A pass is an ordinary step of one token per request, which reads the slots that the pass before has written:

    tokens of the step    a  a1 a2   b   c c c c1            a1, a2 and c1 are draft tokens
    first pass            a          b   c c c               reads and writes the slots of an ordinary step
    second pass              a1                c1
    third pass                  a2

`order` has the tokens in the order of the passes; `place` is where each token of the step is in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from mvllm.platform.shapes import ShapePolicy, StepKind
from mvllm.platform.state import StateLayout

_PARTS_BEFORE_DRAFTS = 3


@dataclass
class StatePassInputs:
    """The passes of one step.

    Attributes:
        order: int32 [sum of the tokens of all passes], device.
        place: int32 [T], device.
        drafts: The layouts of the passes over draft tokens. That of the first pass is `StepInputs.state_layout`.
    """

    order: torch.Tensor
    place: torch.Tensor
    drafts: list[StateLayout]


@dataclass(frozen=True)
class DraftSlots:
    """The slots behind the draft tokens of a step.

    Attributes:
        counts: int32 [R], host: draft tokens of each row.
        slots: int32 [R, 1 + most draft tokens of a row], host: the slots behind the known tokens and behind each draft
            token; -1 for none.
    """

    counts: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, write_slots: np.ndarray, draft_slots: Mapping[int, Sequence[int]]) -> DraftSlots:
        """From the slots behind the known tokens, int32 [R], and those behind draft tokens, by position."""
        counts = np.zeros(len(write_slots), dtype=np.int32)
        slots = np.full((len(write_slots), 1 + max(map(len, draft_slots.values()))), -1, dtype=np.int32)
        slots[:, 0] = write_slots
        for position, behind in draft_slots.items():
            counts[position] = len(behind)
            slots[position, 1 : 1 + len(behind)] = behind
        return cls(counts, slots)

    def sizes(self, num_tokens: int, shapes: ShapePolicy, captured: tuple[int, int, int] | None) -> tuple[int, ...]:
        """Tokens of each pass after padding.

        Args:
            num_tokens: Of the step, without padding.
            captured: Of a captured step: the tokens of the first pass, the requests, and the most draft tokens of a
                row in any step.
        """
        if captured is not None:
            return (captured[0], *[captured[1]] * captured[2])
        known = ShapePolicy.pad(num_tokens - int(self.counts.sum()), shapes.tokens)
        rows = (int((self.counts > i).sum()) for i in range(self.slots.shape[1] - 1))
        return (known, *(ShapePolicy.pad(count, shapes.requests) for count in rows))


def part_sizes(tokens: int, requests: int, passes: tuple[int, ...]) -> list[int]:
    """Sizes of the parts of a step's buffer for its passes: order, place, and `query_start_loc` of the first pass; then
    `query_start_loc`, `read_slots` and `write_slots` of each further one.

    Args:
        tokens, requests: T and R.
        passes: Tokens of each pass; none for a step with one pass, which needs no parts.
    """
    if not passes:
        return []
    return [sum(passes), tokens, requests + 1, *(size for rows in passes[1:] for size in (rows + 1, rows, rows))]


def write_passes(
    parts: Sequence[np.ndarray],
    passes: tuple[int, ...],
    drafts: DraftSlots,
    query_start_loc: np.ndarray,
) -> int:
    """Writes the parts.

    Args:
        parts: Those of `part_sizes`.
        passes: Tokens of each pass.
        drafts: The draft tokens of the R rows, without padding.
        query_start_loc: int32 [R + 1]: of the step, without padding.

    Returns:
        The most known tokens of a row.
    """
    order, place, known_start_loc = parts[:_PARTS_BEFORE_DRAFTS]
    starts, counts = query_start_loc[:-1], drafts.counts
    num_known = np.diff(query_start_loc) - counts
    num_rows, begins = len(starts), [0, *accumulate(passes)]
    order[:], place[:] = 0, 0
    known_start_loc[0] = 0
    num_known.cumsum(out=known_start_loc[1 : num_rows + 1])
    known_start_loc[num_rows + 1 :] = known_start_loc[num_rows]
    index = np.arange(known_start_loc[num_rows], dtype=np.int32)
    tokens = index + (starts - known_start_loc[:num_rows]).repeat(num_known)
    order[: len(tokens)] = tokens
    place[tokens] = index
    for i in range(len(passes) - 1):
        at = _PARTS_BEFORE_DRAFTS + 3 * i
        start_loc, read, write = parts[at : at + 3]
        rows = (counts > i).nonzero()[0]
        tokens = starts[rows] + num_known[rows] + i
        begin, count = begins[i + 1], len(rows)
        order[begin : begin + count] = tokens
        place[tokens] = np.arange(begin, begin + count, dtype=np.int32)
        start_loc[:] = np.minimum(np.arange(len(start_loc), dtype=np.int32), count)
        read[count:], write[count:] = -1, -1
        if count:
            read[:count], write[:count] = drafts.slots[rows, i], drafts.slots[rows, i + 1]
    return int(num_known.max())


def write_padding(parts: Sequence[np.ndarray]) -> None:
    """Writes the parts of a step without requests."""
    for part in parts:
        part[:] = 0
    for slots in (*parts[_PARTS_BEFORE_DRAFTS + 1 :: 3], *parts[_PARTS_BEFORE_DRAFTS + 2 :: 3]):
        slots[:] = -1


def pass_inputs(
    parts: Sequence[np.ndarray], views: Sequence[torch.Tensor], passes: tuple[int, ...], *, capture: bool
) -> StatePassInputs:
    """The passes from their parts on the host and on the device."""
    drafts = [
        slots_layout(parts, views, (at, at + 1, at + 2), rows, rows, kind=StepKind.DECODE, capture=capture)
        for at, rows in zip(range(_PARTS_BEFORE_DRAFTS, len(parts), 3), passes[1:], strict=True)
    ]
    return StatePassInputs(views[0], views[1], drafts)


def slots_layout(
    parts: Sequence[np.ndarray],
    views: Sequence[torch.Tensor],
    indices: tuple[int, int, int],
    num_requests: int,
    num_tokens: int,
    *,
    max_query_len: int = 1,
    kind: StepKind,
    num_decodes: int | None = None,
    capture: bool,
) -> StateLayout:
    """A StateLayout.

    Args:
        parts, views: The parts of a buffer on the host and on the device.
        indices: Those of `query_start_loc`, `read_slots` and `write_slots`.
        num_decodes: By default all requests are decode rows.
        num_requests, num_tokens, max_query_len, kind, capture: As in StateLayout.
    """
    starts, read, write = indices
    return StateLayout(
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        query_start_loc=parts[starts],
        read_slots=parts[read],
        write_slots=parts[write],
        query_start_loc_device=views[starts],
        read_slots_device=views[read],
        write_slots_device=views[write],
        kind=kind,
        num_decodes=num_requests if num_decodes is None else num_decodes,
        capture=capture,
    )
