"""Shared memory without a name, which the kernel frees when the last process closes it.

A segment is shared by passing its descriptor, so it needs no unlinking and no resource tracker, and nothing is left
after `kill -9` of any process. Every page is allocated at creation: lack of memory is an error there, not a SIGBUS at
some later store.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile

from mvllm.executor.message_queue.errors import SharedMemoryError
from mvllm.executor.process.process_utils import anonymous_file, memory_file

if sys.platform == "linux":
    import fcntl

FALLBACK_DIRECTORY = "/dev/shm"  # noqa: S108
_ZEROS = bytes(1 << 20)


class SharedSegment:
    """A mapped region of shared memory.

    Args:
        fd: Its descriptor, which the segment takes over.

    Attributes:
        view: All its bytes, writable; zero at creation.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int, name: str, directory: str | None = None) -> SharedSegment:
        """Allocates `size` bytes.

        Args:
            name: Shown in /proc.
            directory: A memory file system to allocate in (for instance /dev/shm), or None for anonymous memory,
                which no mount limits, where the system has it.

        Raises:
            SharedMemoryError: There is not enough memory.
        """
        fd = anonymous_file(name, directory or anonymous_directory())
        try:
            _allocate(fd, size)
            if directory is None:
                _forbid_resizing(fd)
            return cls(fd)
        except OSError as e:
            os.close(fd)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise
            where = directory or anonymous_directory() or "memory"
            raise SharedMemoryError(
                f"The queue {name!r} needs {size:,} bytes of shared memory, and {where} does not have them "
                f"({e.strerror}). Use fewer or smaller slots, or give it more room: in a container start it with a "
                "larger --shm-size (or --memory), or with --ipc=host."
            ) from e

    def close(self) -> None:
        """Unmaps the memory. Idempotent. Views that a caller still holds keep the mapping alive."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def anonymous_directory() -> str | None:
    """The directory that replaces anonymous memory, or None where the system has anonymous memory."""
    fd = memory_file("probe")
    if fd < 0:
        return FALLBACK_DIRECTORY if os.path.isdir(FALLBACK_DIRECTORY) else tempfile.gettempdir()
    os.close(fd)
    return None


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    for start in range(0, size, len(_ZEROS)):
        os.write(fd, _ZEROS[: size - start])


def _forbid_resizing(fd: int) -> None:
    """Seals the size, so that no process can remove pages that another one has mapped."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # not an anonymous file: it cannot be sealed, and has no name to open it by
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
