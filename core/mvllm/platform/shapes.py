"""Sizes to which steps are padded, for graph capture and for compilers with static shapes."""

from __future__ import annotations

import enum
import sys
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from mvllm.contract import Phase, phase
from mvllm.errors import ContractError


@phase(Phase.WORKER)
class StepKind(enum.Enum):
    """What the requests of a step compute. Since contract 1.1.

    A *decode row* is a request with one token that is not a draft token.

    Attributes:
        DECODE: Every request has one token.
        VERIFY: Every request is a decode row, and at least one of them verifies draft tokens.
        MIXED: At least one request has several tokens that are not draft tokens, for instance of its prompt.
    """

    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@phase(Phase.WORKER)
@dataclass(frozen=True)
class CaptureShapes:
    """Shapes of the steps that a platform captures in graphs, or compiles, one by one.

    Since contract 1.1, part of ShapePolicy. Core pads a step to one of these shapes if one holds it, and marks it
    (`BatchLayout.capture`); other steps are padded to the buckets of ShapePolicy. In the warm-up core runs a step of
    each decode and verify size and, for each number of tokens among `mixed`, of the shape with the fewest requests.
    The other shapes occur first in a step of requests.

    Attributes:
        decode: Numbers of requests, rising. Such a step has as many tokens.
        verify: Numbers of requests, rising. Such a step has `num_speculative_tokens` + 1 times as many tokens.
        mixed: Numbers of tokens and of requests as pairs, rising; requests do not exceed tokens.
        max_tokens: Most tokens of such a step. None sets no limit.
    """

    decode: tuple[int, ...] = ()
    verify: tuple[int, ...] = ()
    mixed: tuple[tuple[int, int], ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("decode", "verify"):
            if not _are_rising_sizes(found := getattr(self, name)):
                raise ContractError(f"CaptureShapes: {name} must be a tuple of rising sizes, found {found!r}.")
        pairs: object = self.mixed
        if (
            not isinstance(pairs, tuple)
            or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
            or not all(type(size) is int and size > 0 for pair in pairs for size in pair)
            or any(requests > tokens for tokens, requests in pairs)
            or any(a >= b for a, b in pairwise(pairs))
        ):
            raise ContractError(
                "CaptureShapes: mixed must be a tuple of rising pairs (tokens, requests) with at most as many requests "
                f"as tokens, found {pairs!r}."
            )

    def shape_of(
        self, kind: StepKind, num_tokens: int, num_requests: int, num_draft_tokens: int
    ) -> tuple[int, int] | None:
        """Tokens and requests of the smallest of these shapes that holds a step; None if there is none.

        Args:
            kind: Kind of the step.
            num_tokens, num_requests: Sizes of the step.
            num_draft_tokens: Most draft tokens of a request in any step.
        """
        found: tuple[int, int] | None
        if kind is StepKind.MIXED:
            fitting = (pair for pair in self.mixed if pair[0] >= num_tokens and pair[1] >= num_requests)
            found = next(fitting, None)
        else:
            sizes, per_request = (self.decode, 1) if kind is StepKind.DECODE else (self.verify, 1 + num_draft_tokens)
            i = bisect_left(sizes, num_requests)
            found = None if i == len(sizes) else (sizes[i] * per_request, sizes[i])
        return None if found is None or found[0] > self.token_limit else found

    @property
    def token_limit(self) -> int:
        """`max_tokens`, or a number that no step reaches."""
        return sys.maxsize if self.max_tokens is None else self.max_tokens


@phase(Phase.WORKER)
@dataclass(frozen=True)
class ShapePolicy:
    """Sizes to which core pads a step; None leaves a dimension unpadded.

    Returned by `Platform.shapes`. The largest bucket of each dimension must hold the largest step that
    the engine's limits allow; otherwise the engine does not start (ConfigError).

    Attributes:
        tokens: Allowed numbers of tokens, rising.
        requests: Allowed numbers of requests, rising.
        pages: Allowed widths of the block table, rising.
        capture: Shapes that are captured; since contract 1.1. With None, the default, a platform that claims `graphs`
            captures decode steps of the sizes in `requests`, and no step is marked. Not used with `static_shapes`.
    """

    tokens: tuple[int, ...] | None = None
    requests: tuple[int, ...] | None = None
    pages: tuple[int, ...] | None = None
    capture: CaptureShapes | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "requests", "pages"):
            buckets: object = getattr(self, name)
            if buckets is not None and not _are_rising_sizes(buckets):
                raise ContractError(f"ShapePolicy: {name} must be None or a tuple of rising sizes, found {buckets!r}.")

    @staticmethod
    def pad(size: int, buckets: tuple[int, ...] | None) -> int:
        """The smallest bucket that holds `size`; `size` itself where there are no buckets.

        Raises:
            ValueError: No bucket is large enough.
        """
        if buckets is None:
            return size
        i = bisect_left(buckets, size)
        if i == len(buckets):
            raise ValueError(f"No bucket holds {size}: the largest is {buckets[-1] if buckets else 'none'}.")
        return buckets[i]


def _are_rising_sizes(sizes: object) -> bool:
    return (
        isinstance(sizes, tuple)
        and all(type(size) is int and size > 0 for size in sizes)
        and all(a < b for a, b in pairwise(sizes))
    )
