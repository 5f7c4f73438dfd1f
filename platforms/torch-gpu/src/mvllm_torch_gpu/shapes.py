"""Sizes to which decode steps are padded, so that a few captured graphs serve all of them.

A decode step has as many tokens as requests. Its cost is that of reading the weights and the cache, so a few rows of
padding are free; small sizes are dense where padding would show most. A step with prompt tokens computes for each of
its tokens: it is never captured, and its padding stays below a sixteenth of it.
"""

from __future__ import annotations

from mvllm.plugin_api import ShapePolicy

LARGEST_CAPTURE = 512
"""Most rows of a step that is captured. Beyond, the device computes long enough for the host to keep ahead of it."""

_LARGEST_STEP = 1 << 22
"""More tokens, and more requests, than any step has."""


def decode_sizes() -> tuple[int, ...]:
    """Numbers of rows for which a graph is captured."""
    return (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE + 1, 16))


def policy() -> ShapePolicy:
    """The buckets. The width of block tables is free: kernels read no further than a sequence is long."""
    sizes = [*decode_sizes()]
    while sizes[-1] < _LARGEST_STEP:
        step = max(16, 1 << (sizes[-1].bit_length() - 5))
        sizes.append(sizes[-1] + step)
    return ShapePolicy(tokens=tuple(sizes), requests=tuple(sizes))
