"""Request pairs: two requests that are scheduled and sampled together.

    primary       | prompt ........................... | generated |
    companion     | its own prompt .... | the same generated tokens |

Each side is a Request with a row and a block table of its own. The primary is in the scheduler's lists, and its
companion in none: every transition of the primary (`RequestLists`) moves both. Each side finds its own prefix in the
cache and computes its prompt in chunks, but neither computes its last token before the other one can. So both sample
in the same step, in which the worker gives both the same token. The planner treats every request as a list of sides:
one, or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mvllm.scheduler.request import Request, RequestStatus


def split_tokens(left: Sequence[int], most: int, rooms: Sequence[int]) -> list[int]:
    """How many of its uncomputed tokens each side of a request computes in a step; all may be 0.

    Args:
        left: Uncomputed tokens of each side, at least one each.
        most: Most tokens of all sides together.
        rooms: Most tokens of each side.
    """
    if len(left) == 1:
        return [min(left[0], most, rooms[0])]
    if sum(left) <= most and all(num <= room for num, room in zip(left, rooms, strict=True)):
        return list(left)
    counts = []
    for num, room in zip(left, rooms, strict=True):
        counts.append(min(num - 1, room, most))
        most -= counts[-1]
    return counts


def pairs_sampled_apart(batch: list[Request], tokens: list[int]) -> Iterator[Request]:
    """The request pairs whose sides have different tokens, because the worker does not know of pairs.

    Args:
        batch: The rows of a step.
        tokens: The token of each.
    """
    token_of = {
        request.companion: token
        for request, token in zip(batch, tokens, strict=True)
        if request.companion is not None and request.status is not RequestStatus.FINISHED
    }
    for request, token in zip(batch, tokens, strict=True):
        if token_of.get(request, token) != token:
            yield request.listed


def num_companion_tokens(batch: list[Request], tokens: list[int]) -> int:
    """How many of the tokens of a step, -1 for none, are those of companions, which repeat their primaries' tokens."""
    return sum(
        token >= 0 and request.primary is not None and request.status is not RequestStatus.FINISHED
        for token, request in zip(tokens, batch, strict=True)
    )
