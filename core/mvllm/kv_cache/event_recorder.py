"""Records what a KV cache stores and removes: as events for other programs, and as changes for load balancers.

The recorder listens to the block pool, and learns the tokens of new blocks from the KVCacheManager. With several groups
of layers a block counts as cached when the first group has it: that group has full attention if any has, and the other
groups follow it, since each keeps the blocks that later tokens attend to. In models with sequence states a cached block
says that its tokens were computed; how much of a prefix can be reused depends on snapshots, too.

Blocks of host memory are reported by the index of host blocks, those of a connector's store by the connector, both by
hash alone. The recorder keeps an index of all reported blocks, from which it takes their tokens.

A hash is set when the plan is made that writes the block. Whoever acts on an event sends a request, which is planned
later, so it finds the block written. Blocks of a failed plan are removed again, see `KVCacheManager.discard`. The same
holds for host blocks: a later plan may load them, and workers wait for the copy that fills them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.listener import KVCacheListener
from mvllm.kv_events.block_index import KVBlockIndex
from mvllm.kv_events.prefix_index import chunk_tokens, ids_with_items, prefix_keys, root_key
from mvllm.messages.kv_events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheChanges,
    KVCacheEvent,
    item_text,
    key_text,
)

HASH_BYTES = 32
"""Of a block in the first group; in the others the number of the group follows."""

MAX_REPORTED_CHUNKS = 1 << 17
"""Most chunks of one cache that load balancers know; of a larger cache they see a part."""


class KVCacheEventRecorder(KVCacheListener):
    """Collects the events of one engine core between two steps. Used from the core's thread.

    Args:
        block_size: Tokens per block.
        with_events: Collect events for `pop_events`.
        with_changes: Collect chunks for `pop_changes`.
        has_tiers: Blocks are also stored in other media than the device.
    """

    def __init__(self, block_size: int, *, with_events: bool, with_changes: bool, has_tiers: bool = False) -> None:
        self._block_size = block_size
        self._chunk = chunk_tokens(block_size)
        self._blocks_per_chunk = self._chunk // block_size
        self._with_events, self._with_changes = with_events, with_changes
        self._new: set[BlockHash] = set()  # hashes set since the last `blocks_hashed`
        self._events: list[KVCacheEvent] = []
        self._index = KVBlockIndex() if with_events and has_tiers else None  # after all events
        self._key_by_hash: dict[BlockHash, int] = {}  # of the last block of each reported chunk
        self._is_cleared = False
        self._changed: dict[int, bool] = {}  # key -> whether it is stored now

    # ------------------------------------------------------------------------------------ listener of the block pool

    def block_stored(self, block: int, block_hash: BlockHash) -> None:
        """See KVCacheListener."""
        if len(block_hash) == HASH_BYTES:
            self._new.add(block_hash)

    def block_evicted(self, block: int, block_hash: BlockHash) -> None:
        """See KVCacheListener."""
        if len(block_hash) == HASH_BYTES:
            self.record_removed([block_hash], DEVICE)

    def all_evicted(self) -> None:
        """See KVCacheListener."""
        if self._index is not None:
            self.record_removed(list(self._index.hashes(DEVICE)), DEVICE)
        elif self._with_events:
            self._events = [AllBlocksCleared()]
        if self._with_changes:
            self._is_cleared = True
            self._changed.clear()
            self._key_by_hash.clear()

    # ------------------------------------------------------------------------------------------- the KVCacheManager

    def blocks_hashed(self, table: BlockTable, first: int, end: int) -> None:
        """The blocks `first` to `end - 1` of a table were offered to the pool: those that are new are recorded."""
        new, hashes, i = self._new, table.block_hashes, first
        if not new:
            return
        while i < end:
            if hashes[i] not in new:
                i += 1
                continue
            start = i
            while i < end and hashes[i] in new:
                i += 1
            if self._with_events:
                event = self._stored_event(table, start, i)
                self._events.append(event)
                if self._index is not None:
                    self._index.apply([event])
        if self._with_changes:
            self._store_chunks(table, first, end)
        new.clear()

    def record_removed(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Blocks are no longer stored in a medium."""
        if self._index is not None:  # of blocks that are not stored there nothing is said
            blocks = self._index.blocks
            hashes = [each for each in hashes if each in blocks and medium in blocks[each].media]
            self._index.apply([BlockRemoved(list(hashes), medium)])
        if self._with_events and hashes:
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockRemoved) and last.medium == medium:
                last.block_hashes.extend(hashes)
            else:
                self._events.append(BlockRemoved(list(hashes), medium))
        if self._with_changes and medium == DEVICE:
            for block_hash in hashes:
                if (key := self._key_by_hash.pop(block_hash, None)) is not None:
                    self._changed[key] = False

    # ---------------------------------------------------------------------------------------------------- other media

    @property
    def records_media(self) -> bool:
        """Whether blocks in other media than the device are recorded."""
        return self._index is not None

    def host_block_changed(self, key: BlockHash, is_stored: bool) -> None:
        """See KVCacheListener."""
        if len(key) == HASH_BYTES:
            if is_stored:
                self.record_stored([key], HOST)
            else:
                self.record_removed([key], HOST)

    def record_stored(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Blocks are also stored in another medium than the device."""
        index = self._index
        for block_hash in hashes if index is not None else ():
            assert index is not None
            block = index.blocks.get(block_hash)
            if block is not None and medium in block.media:
                continue
            index.block_size = self._block_size
            event, last = index.event(block_hash, medium), self._events[-1] if self._events else None
            index.apply([event])
            if isinstance(last, BlockStored) and _continues(last, event):
                last.block_hashes.extend(event.block_hashes)
                last.token_ids.extend(event.token_ids)
                if last.extra_keys is not None and event.extra_keys is not None:
                    last.extra_keys.extend(event.extra_keys)
            else:
                self._events.append(event)

    def describe(self, table: BlockTable, i: int) -> None:
        """Tells the tokens of block `i` of a table, before it is recorded as stored by its hash alone."""
        index, block_hash = self._index, table.block_hashes[i]
        if index is not None and (block_hash not in index.blocks or not index.blocks[block_hash].token_ids):
            stored = index.blocks[block_hash].media if block_hash in index.blocks else ()
            index.apply([self._stored_event(table, i, i + 1, HOST)])
            index.blocks[block_hash].media = stored

    def clear(self) -> None:
        """No block is stored in any medium, as far as requests can find it."""
        if self._index is not None:
            self._events = [AllBlocksCleared()]
            self._index.apply(self._events)

    # ---------------------------------------------------------------------------------------------------------- pop

    def pop_events(self) -> list[KVCacheEvent]:
        """The events since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def pop_changes(self) -> CacheChanges | None:
        """How the chunks have changed since the last call; None if they have not."""
        if not self._changed and not self._is_cleared:
            return None
        changes = CacheChanges(
            self._is_cleared,
            [key for key, is_stored in self._changed.items() if is_stored],
            [] if self._is_cleared else [key for key, is_stored in self._changed.items() if not is_stored],
        )
        self._changed, self._is_cleared = {}, False
        return changes

    def _stored_event(self, table: BlockTable, first: int, end: int, medium: str = DEVICE) -> BlockStored:
        size, keys = self._block_size, dict(table.keys)
        lora_id = int(keys["lora_int_id"]) if "lora_int_id" in keys else None
        return BlockStored(
            table.block_hashes[first:end],
            table.block_hashes[first - 1] if first else None,
            table.token_ids[first * size : end * size],
            size,
            lora_id,
            medium,
            keys.get("lora_name"),
            self._extra_keys(table, first, end) if table.keys or table.items else None,
        )

    def _extra_keys(self, table: BlockTable, first: int, end: int) -> list[list[str]]:
        """What decides about each block beside its tokens: the key of the request, and the items in the block."""
        of_request, size = [key_text(root_key(table.keys))] if table.keys else [], self._block_size
        return [
            of_request
            + [
                item_text(span.content_hash, span.offset - block * size)
                for span in table.items
                if span.offset < (block + 1) * size and span.stop > block * size
            ]
            for block in range(first, end)
        ]

    def _store_chunks(self, table: BlockTable, first: int, end: int) -> None:
        count, keys = self._blocks_per_chunk, table.prefix_keys
        num_chunks = end // count
        if num_chunks > len(keys):
            root = keys[-1] if keys else root_key(table.keys)
            start = len(keys) * self._chunk
            tokens: Sequence[int] = table.token_ids[start : num_chunks * self._chunk]
            if table.items:
                tokens = ids_with_items(tokens, table.items, start)
            keys.extend(prefix_keys(tokens, self._chunk, root))
        for chunk in range(first // count, num_chunks):
            block_hash = table.block_hashes[(chunk + 1) * count - 1]
            if block_hash in self._new and len(self._key_by_hash) < MAX_REPORTED_CHUNKS:
                self._key_by_hash[block_hash] = keys[chunk]
                self._changed[keys[chunk]] = True


def _continues(last: BlockStored, event: BlockStored) -> bool:
    """Whether the block of an event follows those of the last one, so that one event can say both."""
    if last.medium != event.medium or bool(last.token_ids) != bool(event.token_ids):
        return False
    if not event.token_ids:
        return True
    is_next = event.parent_block_hash == last.block_hashes[-1] and event.lora_id == last.lora_id
    keys = [None if each.extra_keys is None else each.extra_keys[0] for each in (last, event)]
    return is_next and event.lora_name == last.lora_name and keys[0] == keys[1]
