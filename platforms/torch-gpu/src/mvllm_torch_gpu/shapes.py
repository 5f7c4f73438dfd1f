"""Sizes to which decode steps are padded, so that a few captured graphs serve all of them.

A decode step has as many tokens as requests. It is bound by reading the weights and the cache, so a few rows of padding
are free; small sizes are dense because padding costs most there. A step with prompt tokens is compute-bound: it is
never captured, and its padding stays below a sixteenth of its size.
"""

from __future__ import annotations

from mvllm.plugin_api import ShapePolicy

LARGEST_CAPTURE = 512
"""Maximum rows of a captured step. Larger steps compute long enough for the host to stay ahead of the device."""

_LARGEST_STEP = 1 << 22
"""Upper bound of the tokens and requests of a step."""


def decode_sizes() -> tuple[int, ...]:
    """Numbers of rows for which a graph is captured."""
    return (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_CAPTURE + 1, 16))


def policy() -> ShapePolicy:
    """The buckets. Block tables have any width, because kernels read only the entries of a sequence."""
    sizes = [*decode_sizes()]
    while sizes[-1] < _LARGEST_STEP:
        step = max(16, 1 << (sizes[-1].bit_length() - 5))
        sizes.append(sizes[-1] + step)
    return ShapePolicy(tokens=tuple(sizes), requests=tuple(sizes))
