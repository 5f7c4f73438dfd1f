"""Messages between engine cores, front ends and the data-parallel coordinator. Typed msgpack.

    engine core   ── CoreLoad ───────────────────────────────────>  coordinator
    front end     ── SentPrefixes | Sleep | SleepDone ───────────>  coordinator
    front end    <── Loads | SentPrefixes | Sleep | SleepDone ────  coordinator

Every message is one datagram on a socket pair, which no other process can join and which needs no framing.
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


class Sleep(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Tells the front ends that the engine sleeps or has woken up.

    Attributes:
        id: Repeated in the SleepDone.
        is_sleeping: True for sleep, False for wake-up.
    """

    id: int
    is_sleeping: bool


class SleepDone(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """A front end has followed a Sleep; to the front end that sent it: all others have."""

    id: int


FromFrontEnd = SentPrefixes | Sleep | SleepDone
ToFrontEnd = CoreLoads | SentPrefixes | Sleep | SleepDone
