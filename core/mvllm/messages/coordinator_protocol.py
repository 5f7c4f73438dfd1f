"""Messages between engine cores, front ends and the data-parallel coordinator. Typed msgpack.

    engine core   ── CoreLoad ───────────────────────────────────>  coordinator
    front end     ── SentPrefixes | SleepNotice | SleepDone ───────────>  coordinator
    front end    <─ CoreLoads | SentPrefixes | SleepNotice | SleepDone ─  coordinator

Every message is one datagram on a socket pair: no other process can connect, and no framing is needed.
"""

from __future__ import annotations

import msgspec

from mvllm.messages.requests import SchedulerStats


class CoreLoad(msgspec.Struct, tag=1, array_like=True):
    """The load of one engine core.

    Attributes:
        rank: The replica's rank.
        stats: Its scheduler's state.
        unfinished: Number of unfinished sequences, by front end.
    """

    rank: int
    stats: SchedulerStats
    unfinished: list[int]


class CoreLoads(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The loads of several cores."""

    loads: list[CoreLoad]


class SentPrefixes(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Hashes of the prompt prefixes that a front end has sent to a replica; see DPLoadBalancer."""

    rank: int
    hashes: list[int]


class SleepNotice(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Tells the front ends that the engine has gone to sleep or woken up.

    Attributes:
        id: Repeated in the SleepDone.
        is_sleeping: True for sleep, False for wake-up.
    """

    id: int
    is_sleeping: bool


class SleepDone(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Confirms a SleepNotice. From a front end: it has applied it. To the sender of the notice: all others have."""

    id: int


FromFrontEnd = SentPrefixes | SleepNotice | SleepDone
ToFrontEnd = CoreLoads | SentPrefixes | SleepNotice | SleepDone
