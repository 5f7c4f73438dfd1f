"""Non-causal spans in the inputs of steps: how many positions each token sees."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm.messages.multimodal import ItemSpan
from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.non_causal_spans import NonCausalSpans
from tests.unit.worker.builders import as_list, make_builder, make_new, make_plan, make_rows


def make_item(offset: int, *embedded: tuple[int, int], length: int = 0, is_causal: bool = False) -> ItemSpan:
    return ItemSpan(bytes(32), offset, length or embedded[-1][1], list(embedded), is_causal=is_causal)


def seen(spans: NonCausalSpans, *parts: tuple[int, int, int], padded: int = 0) -> list[int] | None:
    """`visible_lens` of a step with (row, first position, tokens) for each request."""
    rows, first, num_scheduled = (np.array(column, dtype=np.int32) for column in zip(*parts, strict=True))
    found = spans.visible_lens(rows, first, num_scheduled, padded or int(num_scheduled.sum()))
    return None if found is None else found.tolist()


def test_tokens_of_a_span_see_its_end_and_others_what_is_before_them() -> None:
    spans = NonCausalSpans()
    spans.set_row(1, [make_item(2, (0, 3)), make_item(6, (1, 3), length=4)])
    assert seen(spans, (1, 0, 12)) == [1, 2, 5, 5, 5, 6, 7, 9, 9, 10, 11, 12]


def test_each_run_of_embeddings_of_an_item_is_a_span() -> None:
    spans = NonCausalSpans()
    spans.set_row(0, [make_item(1, (0, 2), (3, 5))])
    assert seen(spans, (0, 0, 7)) == [1, 3, 3, 4, 6, 6, 7]


def test_a_step_may_begin_in_a_span_and_rows_are_told_apart() -> None:
    spans = NonCausalSpans()
    spans.set_row(3, [make_item(4, (0, 6))])
    spans.set_row(2, [make_item(0, (0, 2))])
    assert seen(spans, (0, 5, 1), (3, 7, 4), (2, 0, 3), padded=10) == [6, 10, 10, 10, 11, 2, 2, 3, 0, 0]


def test_steps_outside_of_spans_are_causal() -> None:
    spans = NonCausalSpans()
    assert seen(spans, (0, 0, 4)) is None
    spans.set_row(0, [make_item(4, (0, 3)), make_item(9, (0, 1))])
    assert seen(spans, (0, 0, 4)) is None  # before it
    assert seen(spans, (0, 7, 5)) is None  # behind it; a span of one token sees what every token sees
    assert seen(spans, (0, 6, 3)) is None  # begins with its last token
    assert seen(spans, (1, 4, 3)) is None  # another row
    spans.set_row(2, [make_item(4, (0, 3), is_causal=True)])
    assert seen(spans, (2, 4, 3)) is None
    spans.clear_row(0)
    assert seen(spans, (0, 4, 3)) is None


def test_a_step_that_cuts_a_span_is_a_mistake_of_the_scheduler() -> None:
    spans = NonCausalSpans()
    spans.set_row(0, [make_item(2, (0, 6))])
    with pytest.raises(AssertionError, match="not the span 2 to 8"):
        seen(spans, (0, 0, 5))


def test_the_inputs_of_a_step_have_them_on_host_and_device() -> None:
    rows = make_rows()
    rows.non_causal_spans.set_row(3, [make_item(5, (0, 3))])
    new = [make_new(3, list(range(20, 30)), [9, 2, 6], computed=4), make_new(1, [5, 6, 7, 8], [1], computed=3)]
    rows.apply_plan(make_plan({}, new_requests=new))
    inputs = make_builder(rows, ShapePolicy(tokens=(8, 16), requests=(2, 4))).build(make_plan({1: 1, 3: 5}))
    assert as_list(inputs.visible_lens) == as_list(inputs.visible_lens_device) == [4, 5, 8, 8, 8, 9, 0, 0]
    assert inputs.layout.visible_lens is None, "layers without spans read the same layouts"
    rows.num_computed[3] = 8
    assert make_builder(rows).build(make_plan({1: 1, 3: 2})).visible_lens is None


def test_rows_take_spans_only_where_the_model_has_them() -> None:
    for has_spans in (False, True):
        rows = make_rows(has_non_causal_spans=has_spans)
        request = make_new(0, list(range(6)), [1, 2])
        request.items = [make_item(1, (0, 4))]
        rows.apply_plan(make_plan({}, new_requests=[request]))
        found = make_builder(rows).build(make_plan({0: 6})).visible_lens
        assert (None if found is None else as_list(found)) == ([1, 5, 5, 5, 5, 6] if has_spans else None)
    rows.apply_plan(make_plan({}, freed_rows=[0], new_requests=[make_new(0, list(range(6)), [1, 2])]))
    assert make_builder(rows).build(make_plan({0: 6})).visible_lens is None


def test_a_draft_model_is_causal_and_may_stop_inside_of_a_span() -> None:
    rows = make_rows()
    rows.non_causal_spans.set_row(3, [make_item(5, (0, 3))])
    rows.apply_plan(make_plan({}, new_requests=[make_new(3, list(range(20, 30)), [9, 2, 6], computed=4)]))
    plan = make_plan({3: 2})  # up to position 6 of the span 5 to 8
    assert make_builder(rows, is_causal=True).build(plan).visible_lens is None
    with pytest.raises(AssertionError, match="not the span 5 to 8"):
        make_builder(rows).build(plan)
