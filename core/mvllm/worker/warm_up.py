"""Which steps are run before the first request: of every shape under a ShapePolicy, or enough to compile for any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mvllm.platform.shapes import ShapePolicy


@dataclass(frozen=True)
class StepShape:
    """Sizes after padding, and a step that fills them as far as it can.

    Attributes:
        tokens, requests, pages: Buckets.
        num_tokens, num_requests: Tokens and requests of the step, at most those.
    """

    tokens: int
    requests: int
    pages: int
    num_tokens: int
    num_requests: int


def step_shapes(
    shapes: ShapePolicy, *, max_tokens: int, max_rows: int, max_pages: int, block_size: int
) -> Iterator[StepShape]:
    """Every shape that a step within the limits can have, the largest first. A free dimension has its largest size."""
    every = product(
        _buckets(shapes.tokens, max_tokens), _buckets(shapes.requests, max_rows), _buckets(shapes.pages, max_pages)
    )
    for (over_tokens, tokens), (over_requests, requests), (_, pages) in every:
        # A request has a token at least, and no more new tokens than its pages hold.
        room = requests * pages * block_size
        if over_tokens < room and over_requests < tokens:
            num_tokens = min(tokens, room)
            yield StepShape(tokens, requests, pages, num_tokens, min(requests, num_tokens))


def decode_shapes(shapes: ShapePolicy, *, max_rows: int) -> Iterator[StepShape]:
    """A step of one token per request for each number of requests that steps are padded to, the largest first."""
    for size in sample_sizes(shapes, max_rows):
        count = min(size, max_rows)
        yield StepShape(ShapePolicy.pad(size, shapes.tokens), size, ShapePolicy.pad(1, shapes.pages), count, count)


def dynamic_compile_shapes(
    shapes: ShapePolicy, *, max_tokens: int, max_rows: int, max_pages: int, block_size: int
) -> Iterator[StepShape]:
    """A few small steps in which every size is one and several, and several of two numbers. Each comes once.

    A compiler that takes any size makes a program for sizes of one, and learns from the second number that a size
    varies. The steps are small: they are run for what they compile.
    """
    seen = set()
    for num_tokens, num_requests in ((1, 1), (block_size + 2, 1), (2, 2), (3 * (block_size + 1), 3)):
        num_requests = min(num_requests, max_rows)
        num_tokens = min(num_tokens, max_tokens, num_requests * max_pages * block_size)
        num_requests = min(num_requests, num_tokens)
        pages = -(-num_tokens // (num_requests * block_size))
        shape = StepShape(
            ShapePolicy.pad(num_tokens, shapes.tokens),
            ShapePolicy.pad(num_requests, shapes.requests),
            ShapePolicy.pad(pages, shapes.pages),
            num_tokens,
            num_requests,
        )
        if (key := (shape.tokens, shape.requests, shape.pages)) not in seen:
            seen.add(key)
            yield shape


def sample_sizes(shapes: ShapePolicy, max_rows: int) -> list[int]:
    """Numbers of rows whose logits are computed in one step, after padding, the largest first."""
    return [size for _, size in _buckets(shapes.requests, max_rows)]


def _buckets(buckets: tuple[int, ...] | None, limit: int) -> list[tuple[int, int]]:
    """The buckets that sizes up to `limit` fall into, each with the size that all of its sizes are above."""
    if buckets is None:
        return [(0, limit)]
    used = [size for size in buckets if size < limit] + [ShapePolicy.pad(limit, buckets)]
    return list(zip([0, *used[:-1]], used))[::-1]
