"""Unnamed shared memory: the base of tables that several processes write and read.

Processes share the descriptor, which is inherited, so nothing is left behind when any of them is killed.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

from mvllm.executor.process.process_utils import anonymous_file


class SharedMemory:
    """A mapping of an unnamed file.

    Args:
        fd: The file's descriptor, closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def allocate(cls, name: str, num_bytes: int, *, is_reserved: bool = False) -> Self:
        """New memory, all zeros.

        Args:
            name: For people who read /proc.
            is_reserved: Take the memory now, so that an error comes now; by default pages are taken when written.
        """
        fd = anonymous_file(name)
        if is_reserved:
            os.write(fd, bytes(num_bytes))
        else:
            os.ftruncate(fd, num_bytes)
        return cls(fd)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1
