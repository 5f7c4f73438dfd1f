"""Sizes to which steps are padded, for graph capture and for compilers with static shapes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from mvllm.errors import ContractError


@dataclass(frozen=True)
class ShapePolicy:
    """Sizes to which core pads a step; None leaves a dimension unpadded.

    Phase: worker, returned by `Platform.shapes`. The largest bucket of each dimension must hold the largest step that
    the engine's limits allow; otherwise the engine does not start (ConfigError).

    Attributes:
        tokens: Allowed numbers of tokens, rising.
        requests: Allowed numbers of requests, rising.
        pages: Allowed widths of the block table, rising.
    """

    tokens: tuple[int, ...] | None = None
    requests: tuple[int, ...] | None = None
    pages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "requests", "pages"):
            buckets: object = getattr(self, name)
            if buckets is None:
                continue
            if (
                not isinstance(buckets, tuple)
                or not all(type(size) is int and size > 0 for size in buckets)
                or any(a >= b for a, b in pairwise(buckets))
            ):
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
