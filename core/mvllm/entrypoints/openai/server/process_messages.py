"""Messages between the parent process of several API servers and one of them."""

from __future__ import annotations

import msgspec

from mvllm.engine.process.core_handshake import CoreReady


class CoreStarted(msgspec.Struct, tag=1, frozen=True):
    """To an API server: an engine core is ready for requests.

    Attributes:
        rank: The core's data-parallel rank.
        ready: The core's handshake.
        pid: The core's process id.
    """

    rank: int
    ready: CoreReady
    pid: int


class EngineDied(msgspec.Struct, tag=2, frozen=True):
    """To an API server: the engine has stopped. Running requests fail, and the server ends."""

    message: str


class ShutdownSignal(msgspec.Struct, tag=3, frozen=True):
    """To an API server: a signal was received. After the first, running requests finish; the second aborts them."""

    signal: int


class CoreHung(msgspec.Struct, tag=4, frozen=True):
    """To the parent: an engine core with requests has been silent for too long."""

    rank: int


ParentMessage = CoreStarted | EngineDied | ShutdownSignal
