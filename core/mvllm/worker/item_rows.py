"""Where the items of running requests stand: which tokens of a step take rows of embeddings, and rotary positions.

    prompt       a b P P P c d      span of item X: offset 2, length 3, rows 0..2, rope_length 2
    positions    0 1 2 3 4 5 6      in the sequence: slots and lengths
    rotary       0 1 2 . . 4 5      behind the span one less; in the span what `rope_positions` says

A request needs its arrays while its prompt is computed. Afterwards one number is left: how far its rotary positions are
shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mvllm.messages.multimodal import ArrayData, ItemSpan


@dataclass(frozen=True)
class EmbeddingRows:
    """Consecutive rows of one item's embeddings, for the row of the step at `position` in the batch."""

    content_hash: bytes
    start: int
    stop: int
    position: int


@dataclass
class StepItems:
    """What a step over positions of items needs beside its token ids.

    Attributes:
        indices: int64 [n]: the tokens of the step that take embeddings.
        rows: The rows that they take, in that order.
        rope_spans: (first token of the step, int32 [3, length]): rotary positions of tokens within spans.
        cross_items: By position in the batch, the content hashes of the items to which the row has cross-attention.
        errors: By position in the batch, why embeddings of the row are missing.
    """

    indices: np.ndarray
    rows: list[EmbeddingRows]
    rope_spans: list[tuple[int, np.ndarray]]
    cross_items: dict[int, list[bytes]]
    errors: dict[int, str] = field(default_factory=dict)


class _PromptItems:
    """The items of one prompt.

    Attributes:
        places: int32 [n], rising: positions that take embeddings.
        firsts: int32 [items + 1]: index in `places` of each item's first one, and n.
        hashes: The items.
        stops: int32 [items]: first position behind each.
        shifts: int32 [items + 1]: how far rotary positions are shifted before each item, and behind the last one.
        rope: By item: its rotary positions, int32 [3, length], and the position of its span; None without them.
    """

    def __init__(self, spans: Sequence[ItemSpan]) -> None:
        ranges = [
            np.arange(span.offset + start, span.offset + stop, dtype=np.int32)
            for span in spans
            for start, stop in span.embedded
        ]
        self.places = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int32)
        self.firsts = np.cumsum([0, *(span.num_embeddings for span in spans)])
        self.hashes = [span.content_hash for span in spans]
        self.stops = np.array([span.stop for span in spans], dtype=np.int32)
        advances = [0 if span.rope_length is None else span.rope_length - span.length for span in spans]
        self.shifts = np.cumsum([0, *advances]).astype(np.int32)
        self.rope: list[tuple[int, np.ndarray] | None] = [
            None
            if span.rope_positions is None
            else (span.offset, array_of(span.rope_positions) + span.offset + int(shift))
            for span, shift in zip(spans, self.shifts, strict=False)
        ]

    def rows_between(self, start: int, stop: int, position: int) -> tuple[np.ndarray, list[EmbeddingRows]]:
        """The positions from `start` to `stop - 1` that take embeddings, and the rows that they take."""
        low, high = np.searchsorted(self.places, (start, stop)).tolist()
        rows, first = [], int(np.searchsorted(self.firsts, low, side="right")) - 1
        for item in range(first, len(self.hashes)):
            begin, end = int(self.firsts[item]), int(self.firsts[item + 1])
            if begin >= high:
                break
            if max(low, begin) < min(high, end):
                rows.append(EmbeddingRows(self.hashes[item], max(low, begin) - begin, min(high, end) - begin, position))
        return self.places[low:high], rows


class ItemRows:
    """The items of the running requests, by row.

    Args:
        max_rows: Most running requests.

    Attributes:
        is_used: A running request has items.
        has_shifts: The rotary positions of a running request are shifted.
        shifts: int32 [max_rows]: how far rotary positions are shifted behind all items of the row.
        ends: int32 [max_rows]: first position behind the last item of the row; 0 without items.
    """

    def __init__(self, max_rows: int) -> None:
        self._prompts: dict[int, _PromptItems] = {}
        self._cross: dict[int, list[bytes]] = {}
        self._shifted: set[int] = set()
        self.shifts = np.zeros(max_rows, dtype=np.int32)
        self.ends = np.zeros(max_rows, dtype=np.int32)

    @property
    def is_used(self) -> bool:
        return bool(self._prompts) or bool(self._cross)

    @property
    def has_shifts(self) -> bool:
        return bool(self._shifted)

    def set_row(self, row: int, spans: Sequence[ItemSpan]) -> None:
        """A request with these spans starts in a row, which has none."""
        placed = [span for span in spans if span.length]
        if len(placed) < len(spans):
            self._cross[row] = [span.content_hash for span in spans if not span.length]
        if placed:
            items = self._prompts[row] = _PromptItems(placed)
            self.ends[row], self.shifts[row] = items.stops[-1], items.shifts[-1]
            if items.shifts.any():
                self._shifted.add(row)

    def clear_row(self, row: int) -> None:
        """The request of the row has ended."""
        if self._prompts.pop(row, None) is not None:
            self.ends[row] = self.shifts[row] = 0
            self._shifted.discard(row)
        self._cross.pop(row, None)

    def of_step(self, rows: np.ndarray, first: np.ndarray, num_scheduled: np.ndarray) -> StepItems | None:
        """What a step needs; None if it reads no item.

        Args:
            rows: int64 [R].
            first: int32 [R]: first position of each row in the step.
            num_scheduled: int32 [R]: positions of each row in the step.
        """
        cross = {}
        if self._cross:
            cross = {i: self._cross[row] for i, row in enumerate(rows.tolist()) if row in self._cross}
        reading = (first < self.ends[rows]).nonzero()[0].tolist()
        if not reading and not cross:
            return None
        starts = np.cumsum(num_scheduled) - num_scheduled
        indices: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        slices: list[EmbeddingRows] = []
        rope_spans: list[tuple[int, np.ndarray]] = []
        for i in reading:
            items, begin = self._prompts[int(rows[i])], int(first[i])
            end, shift = begin + int(num_scheduled[i]), int(starts[i]) - begin
            places, taken = items.rows_between(begin, end, i)
            indices.append(places.astype(np.int64) + shift)
            slices += taken
            for rope in items.rope:
                if rope is None or rope[0] >= end or rope[0] + rope[1].shape[1] <= begin:
                    continue
                offset, positions = rope
                low, high = max(begin, offset), min(end, offset + positions.shape[1])
                rope_spans.append((low + shift, positions[:, low - offset : high - offset]))
        found = np.concatenate(indices)
        if not slices and not rope_spans and not cross:
            return None  # between two items, or among the tokens of a span without embeddings
        return StepItems(found, slices, rope_spans, cross)

    def shifts_of(
        self, rows: np.ndarray, first: np.ndarray, num_scheduled: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """int32 [T]: how far the rotary position of each token of a step is shifted. Arguments as for `of_step`.

        Args:
            positions: int32 [T]: positions in the sequences.
        """
        shifts = self.shifts[rows].repeat(num_scheduled)
        starts = None
        for i in (first < self.ends[rows]).nonzero()[0].tolist():
            if starts is None:
                starts = np.cumsum(num_scheduled) - num_scheduled
            items, start = self._prompts[int(rows[i])], int(starts[i])
            tokens = slice(start, start + int(num_scheduled[i]))
            shifts[tokens] = items.shifts[np.searchsorted(items.stops, positions[tokens], side="right")]
        return shifts


def array_of(data: ArrayData) -> np.ndarray:
    """The array, read-only."""
    return np.frombuffer(data.data, dtype=np.dtype(data.dtype).newbyteorder("<")).reshape(data.shape)
