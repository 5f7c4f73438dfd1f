"""The sizes to which steps are padded. Each combination is a program, compiled before the first request.

The number of programs is about the product of the numbers of buckets, and a program of a large model takes tens of
seconds. So there are as few as keep an 8B model with default settings at 40 programs, those of sampling included:

    tokens     quadruple up to 1,024, because small steps are bound by reading the weights; double above, where
               padding costs as much as real tokens
    requests   few, or all: padding requests cost only in attention, and nothing in its kernel for chips
    pages      rise sixteenfold, likewise
"""

from __future__ import annotations

from mvllm.plugin_api import ShapePolicy

_MOST = 1 << 22
"""Upper bound of the tokens, requests and pages of a step."""


def policy() -> ShapePolicy:
    """The buckets."""
    return ShapePolicy(
        tokens=(16, 64, 256, *_rising(1024, 2)),
        requests=_rising(16, 16),
        pages=_rising(32, 16),
    )


def _rising(first: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < _MOST:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
