"""What engine cores, front ends and the coordinator between them say to each other. Typed msgpack.

    engine core   ── CoreLoad ───────────────────────────────────>  coordinator
    front end     ── SentPrefixes | Sleep | SleepDone ───────────>  coordinator
    front end    <── Loads | SentPrefixes | Sleep | SleepDone ────  coordinator

Every message is one datagram of a socket pair, so that nobody can join and nothing has to be put together.
"""

from __future__ import annotations

import msgspec

from mvllm.messages.requests import SchedulerStats


class CoreLoad(msgspec.Struct, tag=1, array_like=True):
    """What one engine core has to do.

    Attributes:
        rank: Which replica.
        stats: Its scheduler's state.
        unfinished: Sequences that it has, by front end.
    """

    rank: int
    stats: SchedulerStats
    unfinished: list[int]


class CoreLoads(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """What each of some cores has to do."""

    loads: list[CoreLoad]


class SentPrefixes(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """A replica was sent prompts with these beginnings, see DPLoadBalancer."""

    rank: int
    hashes: list[int]


class Sleep(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """All front ends are to sleep, or to wake up.

    Attributes:
        id: Given back in the answer.
        is_sleeping: Which of the two.
    """

    id: int
    is_sleeping: bool


class SleepDone(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A front end, or to the one that asked: all of them, have done so."""

    id: int


FromFrontEnd = SentPrefixes | Sleep | SleepDone
ToFrontEnd = CoreLoads | SentPrefixes | Sleep | SleepDone
