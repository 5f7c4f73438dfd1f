"""Host blocks: a file in shared memory with the contents of KV blocks, as all ranks of an engine store them.

The engine core creates the file and decides what is in each host block. Each worker maps it and copies its own part:

    host block 0     rank 0's bytes | rank 1's bytes | ...
    host block 1     rank 0's bytes | rank 1's bytes | ...

There are no locks: plans, and the results of steps, say who uses a block. The file has no name in a file system:
workers open it by the path of the engine core's descriptor. So nothing is left behind by processes that are killed.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from mvllm.errors import CacheError


class HostKVCache:
    """`num_blocks` blocks of `sum(rank_bytes)` bytes.

    Args:
        num_blocks: At least 1.
        rank_bytes: Bytes of each rank's part of one block; all 0 for blocks that only name tokens.
        path: The `path` of a HostKVCache of another process, which is mapped; None to create one.

    Raises:
        CacheError: There is not enough memory, or the file of the other process is gone.
    """

    def __init__(self, num_blocks: int, rank_bytes: list[int], path: str | None = None) -> None:
        self.num_blocks = num_blocks
        self.rank_bytes = rank_bytes
        self.block_bytes = sum(rank_bytes)
        total = num_blocks * self.block_bytes
        try:
            if path is None:
                self._fd = os.memfd_create("mvllm-host-kv-cache")
                os.ftruncate(self._fd, max(1, total))
            else:
                self._fd = os.open(path, os.O_RDWR)
            self._map = mmap.mmap(self._fd, max(1, total))
        except OSError as e:
            raise CacheError(f"A host KV cache of {num_blocks} blocks, {total:,} bytes, cannot be mapped: {e}") from e
        self._array = np.frombuffer(self._map, np.uint8, total).reshape(num_blocks, self.block_bytes)

    @property
    def path(self) -> str:
        """The path by which other processes of this user on this machine map the same blocks."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def fileno(self) -> int:
        """The descriptor of the file, which another process can map. It stays the cache's."""
        return self._fd

    def block(self, index: int) -> np.ndarray:
        """The bytes of a block, of all ranks: uint8 [block_bytes]. A view."""
        return self._array[index]

    def part(self, rank: int) -> np.ndarray:
        """One rank's bytes of all blocks: uint8 [num_blocks, rank_bytes[rank]]. A view."""
        start = sum(self.rank_bytes[:rank])
        return self._array[:, start : start + self.rank_bytes[rank]]
