"""The errors of message queues. Each message names the queue and the peer that it waited for."""

from __future__ import annotations

from mvllm.errors import ConfigError, MvllmError


class QueueError(MvllmError, RuntimeError):
    """Base of all errors of a message queue."""


class QueueTimeoutError(QueueError, TimeoutError):
    """The deadline passed. No message was sent or received; the queue stays usable."""


class QueueStoppedError(QueueError):
    """The stop signal was set before or during a wait."""


class QueueClosedError(QueueError):
    """This end was closed."""


class QueueCorruptError(QueueError):
    """Shared memory or a socket held data that no correct peer writes."""


class PeerDiedError(QueueError):
    """The process at another end of the queue has ended.

    Args:
        message: The text of the error.
        name: The peer's name, from the creation of the queue.
        index: The reader's index, or None for the writer.
        pid: Its process id, or None when it never attached.
    """

    def __init__(self, message: str, *, name: str, index: int | None, pid: int | None) -> None:
        super().__init__(message)
        self.name = name
        self.index = index
        self.pid = pid


class SharedMemoryError(ConfigError):
    """There is not enough shared memory for the requested size."""
