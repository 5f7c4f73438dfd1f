"""What can go wrong in a queue. Each message names the queue, the end that waited, and whom it waited for."""

from __future__ import annotations

from mvllm.errors import ConfigError, MvllmError


class QueueError(MvllmError, RuntimeError):
    """Root of all errors of a message queue."""


class QueueTimeoutError(QueueError, TimeoutError):
    """The deadline passed. Nothing was sent or taken; the queue can be used on."""


class QueueStoppedError(QueueError):
    """The stop signal was set while, or before, this end waited."""


class QueueClosedError(QueueError):
    """This end was closed."""


class QueueCorruptError(QueueError):
    """Shared memory or a socket held what no correct peer can have put there."""


class PeerDiedError(QueueError):
    """A process at another end has ended.

    Args:
        message: The whole story.
        name: The peer's name, as its queue was created with.
        index: The reader's index, or None for the writer.
        pid: Its process id, or None when it never attached.
        activity: What it last said it was doing, or "".
    """

    def __init__(self, message: str, *, name: str, index: int | None, pid: int | None, activity: str) -> None:
        super().__init__(message)
        self.name = name
        self.index = index
        self.pid = pid
        self.activity = activity


class SharedMemoryError(ConfigError):
    """Shared memory of the size that was asked for cannot be had."""
