"""Keeps a PrefixIndex like the cache of one replica, from the replica's events."""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.extension_api.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVBlockIndex,
    KVCacheEvent,
    PrefixIndex,
    Replica,
    item_id,
    item_of_text,
    prefix_keys,
    root_of_text,
)


class PrefixFeed:
    """Applies the events of one replica to an index whose chunks are the replica's blocks.

    Hashes of engines cannot be computed by others: their root may be random. So keys are computed from the tokens in
    the events. The key of a block whose parent is not cached is not known before the parent is cached again.

        subscriber = KVEventSubscriber(endpoint, replay_endpoint, on_events=PrefixFeed(router.index, name).apply)

    Args:
        index: The index. The replica has been added to it.
        replica: The replica.
    """

    def __init__(self, index: PrefixIndex[Replica], replica: Replica) -> None:
        self._index, self._replica = index, replica
        self._blocks = KVBlockIndex()
        self._keys: dict[bytes, int] = {}  # of the blocks whose key is known
        self._children: dict[bytes, set[bytes]] = {}  # of parents that are not cached: blocks without a key

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Applies events, in their order."""
        for event in events:
            self._blocks.apply([event])
            match event:
                case BlockStored():
                    for block_hash in event.block_hashes:
                        self._store(block_hash)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        if block_hash not in self._blocks.blocks:
                            self._remove(block_hash)
                case AllBlocksCleared():
                    self._index.clear(self._replica)
                    self._keys.clear()
                    self._children.clear()

    def _store(self, block_hash: bytes) -> None:
        waiting = [block_hash]
        while waiting:
            block_hash = waiting.pop()
            block = self._blocks.blocks.get(block_hash)
            if block is None or block_hash in self._keys or not block.token_ids:
                continue  # gone, known, or stored by an earlier run of the engine: then its tokens are not known
            if block.parent is None:
                parent = 0 if block.key is None else root_of_text(block.key)
            elif block.parent in self._keys:
                parent = self._keys[block.parent]
            else:
                self._children.setdefault(block.parent, set()).add(block_hash)
                continue
            token_ids = list(block.token_ids)
            for content_hash, place in map(item_of_text, block.items):
                if place >= 0:
                    token_ids[place] = item_id(content_hash)
            [key] = prefix_keys(token_ids, len(token_ids), parent)
            self._keys[block_hash] = key
            self._index.store(self._replica, [key])
            waiting.extend(self._children.pop(block_hash, ()))

    def _remove(self, block_hash: bytes) -> None:
        key = self._keys.pop(block_hash, None)
        if key is not None:
            self._index.remove(self._replica, [key])
