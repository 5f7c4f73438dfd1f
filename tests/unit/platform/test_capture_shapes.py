"""CaptureShapes: the shape of a step, and the shapes that an engine's limits allow."""

from __future__ import annotations

import pytest

from mvllm.errors import ContractError
from mvllm.platform.shapes import CaptureShapes, StepKind
from mvllm.worker.capture_shapes import reachable_shapes, warm_up_shapes

SHAPES = CaptureShapes(
    decode=(1, 2, 4, 8), verify=(1, 4, 8), mixed=((8, 4), (8, 8), (16, 4), (16, 16), (32, 4)), max_tokens=24
)


@pytest.mark.parametrize(
    ("kind", "tokens", "requests", "shape"),
    [
        (StepKind.DECODE, 3, 3, (4, 4)),
        (StepKind.DECODE, 9, 9, None),
        (StepKind.VERIFY, 5, 2, (12, 4)),
        (StepKind.VERIFY, 10, 8, (24, 8)),
        (StepKind.MIXED, 7, 2, (8, 4)),
        (StepKind.MIXED, 7, 5, (8, 8)),
        (StepKind.MIXED, 9, 5, (16, 16)),
        (StepKind.MIXED, 17, 4, None),
    ],
)
def test_the_smallest_shape_that_holds_a_step(kind, tokens, requests, shape):
    assert SHAPES.shape_of(kind, tokens, requests, 2) == shape


def test_verifying_steps_above_the_limit_are_not_captured():
    assert SHAPES.shape_of(StepKind.VERIFY, 8, 8, 3) is None


@pytest.mark.parametrize("max_rows", [1, 3, 8, 30])
@pytest.mark.parametrize("max_tokens", [4, 12, 100])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_reachable_shapes_are_those_of_all_steps_within_the_limits(max_rows, max_tokens, num_drafts):
    max_tokens = max(max_tokens, max_rows)
    found = reachable_shapes(SHAPES, max_tokens=max_tokens, max_rows=max_rows, num_draft_tokens=num_drafts)
    expected = set()
    for requests in range(1, max_rows + 1):
        for tokens in range(requests, max_tokens + 1):
            for kind in StepKind:
                if (kind is StepKind.DECODE and tokens > requests) or (kind is StepKind.VERIFY and not num_drafts):
                    continue
                if (shape := SHAPES.shape_of(kind, tokens, requests, num_drafts)) is not None:
                    expected.add((kind, *shape))
    assert {(shape.kind, shape.tokens, shape.requests) for shape in found} == expected
    assert len(found) == len(expected)


def test_the_warm_up_runs_one_mixed_shape_for_each_number_of_tokens():
    shapes = warm_up_shapes(reachable_shapes(SHAPES, max_tokens=100, max_rows=30, num_draft_tokens=2))
    found = [(shape.kind.value, shape.tokens, shape.requests, shape.max_query_len) for shape in shapes]
    assert found == [
        *[("decode", size, size, 1) for size in (8, 4, 2, 1)],
        *[("verify", 3 * size, size, 3) for size in (8, 4, 1)],
        ("mixed", 16, 4, 16),
        ("mixed", 8, 4, 8),
    ]


@pytest.mark.parametrize(
    "wrong", [{"decode": (2, 1)}, {"verify": [1]}, {"mixed": ((4, 8),)}, {"mixed": ((8, 4), (8, 4))}, {"mixed": (8,)}]
)
def test_lists_that_do_not_rise_are_errors(wrong):
    with pytest.raises(ContractError, match=f"CaptureShapes: {next(iter(wrong))} must be a tuple of rising"):
        CaptureShapes(**wrong)
