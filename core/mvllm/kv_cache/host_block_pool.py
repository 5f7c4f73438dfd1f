"""Index of host blocks: which one holds the contents of which key, and which can be used anew.

A host block is *free*, or *being filled* by a connector, or has contents with a key. One with contents stays until its
memory is needed: the least recently used one is evicted first. A *pinned* host block is neither evicted nor filled:
a plan in flight copies it, a connector reads or fills it, or a waiting request is going to start from it.

    free ──allocate──> being filled ──publish──> has contents ──evicted by allocate──> being filled ...
      ^                     │                         │
      └───── last unpin ────┴──────── discard ────────┘

No tensors, and no bytes: those are in `kv_transfer.host_kv_cache`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.kv_cache.listener import KVCacheListener
from mvllm.kv_transfer.connector import BlockKey


class HostBlockPool:
    """The index of `num_blocks` host blocks, numbered from 0.

    Attributes:
        listeners: Called when host blocks get or lose contents.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.listeners: list[KVCacheListener] = []
        self._num_unused = num_blocks  # the last ones: they were never allocated
        self._free: list[int] = []
        self._keys: dict[int, BlockKey] = {}  # of those that are being filled or have contents
        self._by_key: dict[BlockKey, int] = {}  # those with contents
        self._filling: dict[BlockKey, int] = {}
        self._pins: dict[int, int] = {}
        self._evictable: dict[int, None] = {}  # with contents and without pins, least recently used first

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_available(self) -> int:
        """How many can be allocated now."""
        return self._num_unused + len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """How many have contents, or are being filled, or are pinned."""
        return self.num_blocks - self._num_unused - len(self._free)

    def get(self, key: BlockKey) -> int | None:
        """The host block with these contents."""
        return self._by_key.get(key)

    def get_filling(self, key: BlockKey) -> int | None:
        """The host block that is being filled with these contents."""
        return self._filling.get(key)

    def key_of(self, index: int) -> BlockKey | None:
        """The key of a host block; None if its contents have been discarded."""
        return self._keys.get(index)

    def allocate(self, key: BlockKey) -> int | None:
        """A host block to be filled with the contents of a key that has none. It is pinned once.

        Evicts the least recently used contents if no host block is free. None if all are pinned.
        """
        assert key not in self._by_key and key not in self._filling
        if self._free:
            index = self._free.pop()
        elif self._num_unused:
            index = self.num_blocks - self._num_unused
            self._num_unused -= 1
        elif self._evictable:
            index = next(iter(self._evictable))
            evicted = self._keys[index]
            del self._evictable[index], self._by_key[evicted]
            self._report(evicted, is_stored=False)
        else:
            return None
        self._keys[index] = key
        self._filling[key] = index
        self._pins[index] = 1
        return index

    def publish(self, index: int) -> None:
        """A host block that was being filled has its contents. It keeps its pins."""
        key = self._keys.get(index)
        if key is not None and self._filling.pop(key, None) is not None:
            self._by_key[key] = index
            self._report(key, is_stored=True)

    def pin(self, index: int) -> None:
        """Keeps a host block as it is until `unpin`."""
        self._evictable.pop(index, None)
        self._pins[index] = self._pins.get(index, 0) + 1

    def unpin(self, index: int) -> None:
        """Ends one `pin`. After the last one the host block is the most recently used one."""
        left = self._pins[index] - 1
        if left:
            self._pins[index] = left
            return
        del self._pins[index]
        if index in self._keys:
            assert self._keys[index] in self._by_key, "a host block is neither pinned nor filled"
            self._evictable[index] = None
        else:
            self._free.append(index)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Forgets the contents of these keys, also of those that are being filled. Pinned host blocks stay pinned."""
        for key in keys:
            index = self._by_key.pop(key, None)
            if index is not None:
                self._report(key, is_stored=False)
            else:
                index = self._filling.pop(key, None)
            if index is None:
                continue
            del self._keys[index]
            if index not in self._pins:
                del self._evictable[index]
                self._free.append(index)

    def discard_all(self) -> None:
        """Forgets all contents."""
        self.discard([*self._by_key, *self._filling])

    def _report(self, key: BlockKey, *, is_stored: bool) -> None:
        for listener in self.listeners:
            listener.host_block_changed(key, is_stored)

    def check_integrity(self, pins: dict[int, int]) -> None:
        """Raises AssertionError unless all agrees.

        Args:
            pins: How often each host block is pinned by those who use it.
        """
        assert self._pins == pins, f"Host blocks are pinned {self._pins}, their users say {pins}"
        assert not self._by_key.keys() & self._filling.keys()
        assert {**self._by_key, **self._filling} == {key: index for index, key in self._keys.items()}
        assert set(self._evictable) == set(self._by_key.values()) - set(self._pins)
        assert set(self._filling.values()) <= set(self._pins), "a host block is filled and not pinned"
        used = set(self._keys) | set(self._pins)
        assert not used & set(self._free) and len(used) + len(self._free) + self._num_unused == self.num_blocks
