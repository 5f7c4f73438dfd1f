"""The index of one engine's KV cache, rebuilt from its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from mvllm.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, is_key_text


class IndexedBlock:
    """A block that is stored in one or several media.

    Attributes:
        parent: The hash of the block before it; None for the first one of a sequence.
        token_ids: Its tokens.
        lora: The LoRA adapter's id and name; None for none.
        key: Its `key_text` in `BlockStored.extra_keys`; None for a block that all requests may share.
        items: Its `item_text`s there: the images, audio and embeddings in it.
        media: The media that have it.
    """

    __slots__ = ("items", "key", "lora", "media", "parent", "token_ids")

    def __init__(
        self,
        parent: bytes | None,
        token_ids: tuple[int, ...],
        lora: tuple[int, str | None] | None,
        keys: tuple[str, ...],
    ) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.lora = lora
        self.items = tuple(text for text in keys if not is_key_text(text))
        self.key = next((text for text in keys if is_key_text(text)), None)
        self.media: tuple[str | None, ...] = ()


class KVBlockIndex:
    """The blocks that an engine has stored.

    Attributes:
        blocks: By hash.
        block_size: Tokens per block; 0 before the first block.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, IndexedBlock] = {}
        self.block_size = 0

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Applies events, in their order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.blocks.clear()

    def hashes(self, medium: str | None) -> set[bytes]:
        """The hashes of the blocks that a medium has."""
        return {block_hash for block_hash, block in self.blocks.items() if medium in block.media}

    def as_events(self, max_blocks: int) -> Iterator[list[KVCacheEvent]]:
        """Events that build this index from an empty one, in batches of at most `max_blocks` blocks.

        Blocks that follow each other in a sequence and in the order in which they were stored share an event.
        """
        entries = iter([(block_hash, medium) for block_hash, block in self.blocks.items() for medium in block.media])
        while batch := list(islice(entries, max_blocks)):
            events: list[KVCacheEvent] = []
            for medium, group in groupby(batch, key=lambda entry: entry[1]):
                run: list[bytes] = []
                for block_hash, _ in group:
                    if run and not self._follows(run[-1], block_hash):
                        events.append(self._event(run, medium))
                        run = []
                    run.append(block_hash)
                events.append(self._event(run, medium))
            yield events

    def _store(self, event: BlockStored) -> None:
        size = self.block_size = event.block_size
        lora = None if event.lora_id is None else (event.lora_id, event.lora_name)
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            block = self.blocks.get(block_hash)
            if block is None:
                keys = tuple(event.extra_keys[i]) if event.extra_keys else ()
                tokens = tuple(event.token_ids[i * size : (i + 1) * size])
                block = self.blocks[block_hash] = IndexedBlock(parent, tokens, lora, keys)
            if event.medium not in block.media:
                block.media += (event.medium,)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            block = self.blocks.get(block_hash)
            if block is not None:
                block.media = tuple(medium for medium in block.media if medium != event.medium)
                if not block.media:
                    del self.blocks[block_hash]

    def _follows(self, previous: bytes, block_hash: bytes) -> bool:
        before, block = self.blocks[previous], self.blocks[block_hash]
        return block.parent == previous and block.lora == before.lora and block.key == before.key

    def _event(self, run: list[bytes], medium: str | None) -> BlockStored:
        first = self.blocks[run[0]]
        lora_id, lora_name = first.lora or (None, None)
        keys = [[*([] if first.key is None else [first.key]), *self.blocks[each].items] for each in run]
        return BlockStored(
            list(run),
            first.parent,
            [token for block_hash in run for token in self.blocks[block_hash].token_ids],
            self.block_size,
            lora_id,
            medium,
            lora_name,
            keys if any(keys) else None,
        )
