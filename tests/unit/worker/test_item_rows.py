"""Which rows of embeddings the tokens of a step take, and their rotary positions, against a computation by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mvllm.messages.multimodal import ArrayData, ItemSpan
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.shapes import CaptureShapes, ShapePolicy
from mvllm.worker.item_rows import ItemRows
from tests.unit.worker.builders import make_builder, make_new, make_rows


def random_spans(dice: random.Random, length: int) -> list[ItemSpan]:
    spans, place = [], dice.randrange(3)
    while place < length - 2:
        size = dice.randrange(1, min(9, length - place))
        bounds = sorted(dice.sample(range(size + 1), 2)) if size > 1 else [0, 1]
        embedded = [(bounds[0], bounds[1])]
        if bounds[1] + 1 < size:
            embedded.append((bounds[1] + 1, size))
        rope, advance = None, None
        if dice.random() < 0.6:
            advance = dice.randrange(1, size + 1)
            rope = np.array([[dice.randrange(advance) for _ in range(size)] for _ in range(3)], dtype=np.int32)
            rope = ArrayData("int32", [3, size], rope.tobytes())
        spans.append(ItemSpan(bytes([len(spans)]) * 32, place, size, embedded, rope, advance))
        place += size + dice.randrange(3)
    return spans


class Expected:
    """What each position of a prompt takes."""

    def __init__(self, spans: list[ItemSpan], length: int) -> None:
        self.row: list[tuple[bytes, int] | None] = [None] * length
        self.rope = [[i, i, i] for i in range(length)]
        self.is_three: list[bool] = [False] * length
        shift = 0
        for span in spans:
            number = 0
            for start, stop in span.embedded:
                for place in range(start, stop):
                    self.row[span.offset + place] = (span.content_hash, number)
                    number += 1
            values = None
            if span.rope_positions is not None:
                values = np.frombuffer(span.rope_positions.data, dtype=np.int32).reshape(3, -1)
            for place in range(span.length):
                own = [place] * 3 if values is None else values[:, place].tolist()
                self.rope[span.offset + place] = [span.offset + shift + each for each in own]
                self.is_three[span.offset + place] = values is not None
            shift += 0 if span.rope_length is None else span.rope_length - span.length
            for place in range(span.stop, length):
                self.rope[place] = [place + shift] * 3


@pytest.mark.parametrize("seed", range(80))
def test_rows_and_positions_of_any_step(seed: int) -> None:
    dice = random.Random(seed)
    items, lengths, expected = ItemRows(4), {}, {}
    for row in dice.sample(range(4), dice.randrange(1, 5)):
        lengths[row] = dice.randrange(4, 40)
        spans = random_spans(dice, lengths[row]) if dice.random() < 0.8 else []
        items.set_row(row, spans)
        expected[row] = Expected(spans, lengths[row])
    for _ in range(10):
        rows = dice.sample(list(lengths), dice.randrange(1, len(lengths) + 1))
        first = [dice.randrange(lengths[row]) for row in rows]
        counts = [dice.randrange(1, lengths[row] - start + 1) for row, start in zip(rows, first, strict=True)]
        step = items.of_step(np.array(rows), np.array(first, dtype=np.int32), np.array(counts, dtype=np.int32))
        tokens = [
            (row, place)
            for row, start, count in zip(rows, first, counts, strict=True)
            for place in range(start, start + count)
        ]
        wanted = [(i, expected[row].row[place]) for i, (row, place) in enumerate(tokens) if expected[row].row[place]]
        found: list[tuple[int, tuple[bytes, int]]] = []
        if step is not None:
            taken = [(each.content_hash, n) for each in step.rows for n in range(each.start, each.stop)]
            found = list(zip(step.indices.tolist(), taken, strict=True))
            for each in step.rows:
                assert rows[each.position] in lengths
        assert found == wanted
        positions = np.array([place for _, place in tokens], dtype=np.int32)
        rope = np.repeat(positions[None], 3, axis=0)
        if items.has_shifts:
            rope = rope + items.shifts_of(
                np.array(rows), np.array(first, dtype=np.int32), np.array(counts, dtype=np.int32), positions
            )
        for start, values in step.rope_spans if step is not None else ():
            rope[:, start : start + values.shape[1]] = values
        assert rope.T.tolist() == [expected[row].rope[place] for row, place in tokens]
        three = any(expected[row].is_three[place] for row, place in tokens)
        assert three == (step is not None and bool(step.rope_spans))
    for row in lengths:
        items.clear_row(row)
    assert not items.is_used and not items.has_shifts and not items.ends.any() and not items.shifts.any()


def test_decode_steps_behind_items_are_captured_with_shifted_positions() -> None:
    shapes = ShapePolicy(capture=CaptureShapes(decode=(1, 2, 4), mixed=((8, 2),)))
    rows = make_rows()
    builder = make_builder(rows, shapes)
    span = ItemSpan(bytes(32), 1, 3, [(0, 3)], ArrayData("int32", [3, 3], np.zeros((3, 3), np.int32).tobytes()), 1)
    new = make_new(0, [3, 9, 9, 9, 4, 5], [0, 1])
    new.items = [span]
    plan = SchedulerOutput(0, new_requests=[new], rows=[0], num_scheduled_tokens=[6], total_num_scheduled_tokens=6)
    rows.apply_plan(plan)
    inputs = builder.build(plan)
    assert inputs.items is not None and not inputs.layout.capture
    assert inputs.positions[:6].tolist() == [0, 1, 2, 3, 2, 3]
    assert inputs.layout.slot_mapping[:6].tolist() == [0, 1, 2, 3, 4, 5]  # by the position in the sequence
    builder.staging.end_step()
    rows.num_computed[0] = 6
    rows.history.append(np.array([0]), np.array([7]))
    inputs = builder.build(SchedulerOutput(1, rows=[0], num_scheduled_tokens=[1], total_num_scheduled_tokens=1))
    assert inputs.items is None and inputs.layout.capture
    assert inputs.positions[:1].tolist() == [4] and inputs.layout.seq_lens[:1].tolist() == [7]


def test_items_with_cross_attention_are_read_in_every_step() -> None:
    items = ItemRows(2)
    items.set_row(1, [ItemSpan(b"a" * 32, 0, 0, []), ItemSpan(b"b" * 32, 0, 0, [])])
    step = items.of_step(np.array([0, 1]), np.array([5, 9], dtype=np.int32), np.array([1, 1], dtype=np.int32))
    assert step is not None and step.cross_items == {1: [b"a" * 32, b"b" * 32]} and not step.rows
    assert items.of_step(np.array([0]), np.array([5], dtype=np.int32), np.array([1], dtype=np.int32)) is None
