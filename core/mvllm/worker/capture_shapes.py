"""The shapes of captured steps that an engine's limits allow, and those of them that the warm-up runs."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.platform.shapes import CaptureShapes, StepKind


@dataclass(frozen=True)
class CapturedShape:
    """One shape of a captured step.

    Attributes:
        kind: Kind of the step.
        tokens, requests: Sizes after padding.
        max_query_len: Most tokens of one request, as in BatchLayout.
    """

    kind: StepKind
    tokens: int
    requests: int
    max_query_len: int


def reachable_shapes(
    capture: CaptureShapes, *, max_tokens: int, max_rows: int, num_draft_tokens: int
) -> list[CapturedShape]:
    """Every shape to which a step within the limits is padded, largest first of each kind.

    Args:
        max_tokens, max_rows: Most tokens and most requests of a step.
        num_draft_tokens: Most draft tokens of a request.
    """
    found = []
    for kind, sizes in ((StepKind.DECODE, capture.decode), (StepKind.VERIFY, capture.verify)):
        if kind is StepKind.VERIFY and not num_draft_tokens:
            continue
        for size in reversed(sizes):
            rows = min(size, max_rows)
            shape = capture.shape_of(kind, rows, rows, num_draft_tokens)
            if shape is not None and shape[1] == size:
                query_len = 1 if kind is StepKind.DECODE else 1 + num_draft_tokens
                found.append(CapturedShape(kind, *shape, query_len))
    mixed = {
        capture.shape_of(StepKind.MIXED, min(tokens, max_tokens), min(requests, max_rows), num_draft_tokens)
        for tokens, _ in capture.mixed
        for _, requests in capture.mixed
    }
    return found + [CapturedShape(StepKind.MIXED, *pair, pair[0]) for pair in sorted(filter(None, mixed), reverse=True)]


def warm_up_shapes(shapes: list[CapturedShape]) -> list[CapturedShape]:
    """Those of `reachable_shapes` that the warm-up runs: of mixed shapes the one with the fewest requests per size."""
    fewest = {shape.tokens: shape for shape in shapes if shape.kind is StepKind.MIXED}  # the last one is the smallest
    return [shape for shape in shapes if shape.kind is not StepKind.MIXED or fewest[shape.tokens] is shape]
