"""The sizes that steps are padded up to: each combination is a program, compiled before the first request.

Buckets multiply, so they are far apart. Padded tokens cost what real ones do in all matrix products, so tokens double;
padded requests and pages cost in attention alone, and quadruple.
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
