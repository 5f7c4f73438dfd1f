"""The sizes to which steps are padded. Each combination is a program, compiled before the first request.

The number of programs is the product of the numbers of buckets, so there are few buckets. Padding tokens cost as much
as real ones in all matrix products, so token buckets double; padding requests and pages cost only in attention, so
their buckets quadruple.
"""

from __future__ import annotations

from mvllm.plugin_api import ShapePolicy

_MOST = 1 << 22
"""Upper bound of the tokens, requests and pages of a step."""


def policy() -> ShapePolicy:
    """The buckets."""
    return ShapePolicy(tokens=_rising(16, 2), requests=_rising(8, 4), pages=_rising(8, 4))


def _rising(first: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < _MOST:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
