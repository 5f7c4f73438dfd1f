"""What an admission policy is: a question about one waiting request, and a commit of the answer.

For each waiting request, in service order, the policies are asked one after the other (`WaitingPlan`):

    decide    a     b     c     d       ADMIT: the next policy is asked; the request starts if all say so
    commit    a     b     c             PASS_OVER: it keeps waiting, and the next request is looked at
                                        STOP: it keeps waiting, and so does everything after it

`decide` changes nothing outside of the candidate. When the decision is final, each policy that was asked commits it: so
a policy counts, reserves and remembers only what really happens. Policies that have nothing to do in an engine, or
among the present requests, are not asked.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence

from mvllm.kv_cache.kv_cache_manager import CachedPrefix, KVCacheManager
from mvllm.kv_cache.state_slots import SnapshotOffers
from mvllm.scheduler.long_prefill_limiter import WHOLE, PromptShare
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_pairs import split_tokens
from mvllm.scheduler.step import Step

_UNLIMITED = (sys.maxsize, sys.maxsize)


class Decision(enum.Enum):
    """What happens to a waiting request in the step being planned."""

    ADMIT = enum.auto()
    PASS_OVER = enum.auto()
    STOP = enum.auto()


class Candidate:
    """A waiting request, and what the policies have found about it. Lives for one look at the request.

    Lists have an entry for each side: two for a request pair, otherwise one.

    Attributes:
        request, sides: The request.
        step: The step being planned.
        share: How many of its uncomputed tokens it may compute in this round.
        offers: Snapshots on offer to each side; None for a side that does not wait for any.
        ends_at_snapshots: The step computes no token after the first position where a side's state is kept.
        decided_by: The policy that has passed it over or stopped; None if none has.
        lacks_blocks: All policies agreed, but there were not enough free blocks.
    """

    __slots__ = (
        *("_counts", "_kv_cache", "_left", "_prefixes", "_starts"),
        *("decided_by", "ends_at_snapshots", "lacks_blocks", "offers", "request", "share", "sides", "step"),
    )

    def __init__(self, request: Request, step: Step, kv_cache: KVCacheManager) -> None:
        self.request = request
        self.sides = request.sides
        self.step = step
        self.share: PromptShare = WHOLE
        self.offers: Sequence[SnapshotOffers | None] = ()
        self.ends_at_snapshots = False
        self.decided_by: AdmissionPolicy | None = None
        self.lacks_blocks = False
        self._kv_cache = kv_cache
        self._prefixes: list[CachedPrefix] = []
        self._starts: list[int] = []
        self._left: list[int] = []
        self._counts: list[int] | None = None

    @property
    def prefixes(self) -> list[CachedPrefix]:
        """What is cached of each side. Looked up once, when the first policy needs it."""
        if not self._prefixes:
            self._look_up()
        return self._prefixes

    def find_blocks(self, number: int) -> list[int]:
        """The cached blocks of a side. Those of a second side are looked up again, after blocks were allocated."""
        if number:
            self._prefixes[number] = self._find_prefix(self.sides[number])
            self._measure()
            self._counts = None
        return self.prefixes[number].blocks

    @property
    def starts(self) -> list[int]:
        """The first position that each side has to compute."""
        if not self._prefixes:
            self._look_up()
        return self._starts

    @property
    def left(self) -> list[int]:
        """The tokens that each side has to compute."""
        if not self._prefixes:
            self._look_up()
        return self._left

    @property
    def counts(self) -> list[int]:
        """The tokens that each side computes in this step, if the request starts."""
        if self._counts is None:
            left, most = self.left, min(self.share.num_tokens, self.step.budget)
            self._counts = split_tokens(left, most, self._rooms())
        return self._counts

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        self._counts = counts

    @property
    def shared_ends(self) -> list[int]:
        """Where each side leaves a snapshot because others share its tokens up to there. Needs `offers`."""
        return [
            prefix.num_shared_tokens if offers is None else offers.shared_end
            for prefix, offers in zip(self.prefixes, self.offers, strict=True)
        ]

    def _rooms(self) -> Sequence[int]:
        """The most tokens of each side in this step, whatever its budget."""
        states = self._kv_cache.states
        if states is None or not self.ends_at_snapshots:
            return _UNLIMITED[: len(self.sides)]
        return [
            states.first_position(side.table, start, end) - start
            for side, start, end in zip(self.sides, self.starts, self.shared_ends, strict=True)
        ]

    def _look_up(self) -> None:
        """Finds the cached prefixes."""
        self._prefixes = [self._find_prefix(side) for side in self.sides]
        self._measure()

    def _measure(self) -> None:
        """Counts the tokens of each side behind its prefix."""
        size, num_groups = self._kv_cache.block_size, self._kv_cache.num_groups
        starts, left = [], []
        for side, prefix in zip(self.sides, self._prefixes):
            starts.append(start := len(prefix.blocks) // num_groups * size)
            left.append(side.num_tokens - start)
        self._starts, self._left = starts, left

    def _find_prefix(self, side: Request) -> CachedPrefix:
        return CachedPrefix([]) if side.needs_every_position else self._kv_cache.find_prefix(side.table)


class AdmissionPolicy:
    """Decides about waiting requests for one reason."""

    def start_round(self, requests: RequestLists) -> bool:
        """Begins to look at the waiting requests. There may be two rounds in a step.

        Args:
            requests: The requests of the scheduler.

        Returns:
            False if it would admit everything: then it is not asked in this round.
        """
        return True

    def decide(self, candidate: Candidate) -> Decision:
        """What should happen to a request. Changes nothing; what it finds may be stored in the candidate."""
        raise NotImplementedError

    def commit(self, candidate: Candidate, decision: Decision) -> None:
        """Records the final decision on a request about which this policy was asked.

        Args:
            decision: ADMIT: it has its blocks, and starts.
        """
