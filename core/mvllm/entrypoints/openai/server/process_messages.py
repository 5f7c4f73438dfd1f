"""What the process that started the API servers and an API server say to each other."""

from __future__ import annotations

import msgspec

from mvllm.engine.process.core_handshake import CoreReady


class CoreStarted(msgspec.Struct, tag=1, frozen=True):
    """An engine core waits for requests.

    Attributes:
        rank: Which one.
        ready: What it says of itself.
        pid: Its process.
    """

    rank: int
    ready: CoreReady
    pid: int


class EngineDied(msgspec.Struct, tag=2, frozen=True):
    """The engine can no longer be used: requests under way fail, and the server ends."""

    message: str


class ShutdownSignal(msgspec.Struct, tag=3, frozen=True):
    """A signal has come, the first of which lets requests under way finish, and the second does not."""

    signal: int


class CoreHung(msgspec.Struct, tag=4, frozen=True):
    """From an API server: a core that has work has given no sign of life for too long."""

    rank: int


ParentMessage = CoreStarted | EngineDied | ShutdownSignal
