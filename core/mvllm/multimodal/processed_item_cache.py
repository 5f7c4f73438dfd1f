"""Keeps processed items, so that an image in every turn of a conversation is decoded and processed once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from mvllm.multimodal.media_source import MediaSource
from mvllm.multimodal.processed_item import ProcessedItem

Key = tuple[bytes, str]


class ProcessedItemCache:
    """The most recently used processed items, within a limit of bytes. May be used from any thread.

    Args:
        max_bytes: Most bytes of their features; 0 keeps none.

    Attributes:
        num_bytes: Bytes of their features.
        generation: Number of `clear` calls so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[Key, ProcessedItem] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.generation = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, digest: bytes, counts: Mapping[str, int]) -> ProcessedItem | None:
        """The item of a content.

        Args:
            digest: See `digest_source`.
            counts: Number of items of the prompt by modality.
        """
        with self._lock:
            for key in ((digest, ""), (digest, _shown(counts))):
                if (item := self._items.get(key)) is not None:
                    self._items.move_to_end(key)
                    return item
        return None

    def put(
        self,
        digest: bytes,
        counts: Mapping[str, int],
        item: ProcessedItem,
        *,
        depends_on_counts: bool,
        generation: int,
    ) -> None:
        """Adds an item, and drops the least recently used ones beyond the limit.

        Args:
            digest, counts: As for `get`.
            item: The item.
            depends_on_counts: It is found with these counts only.
            generation: The cache's when work on the item began. Nothing is added if `clear` was called since.
        """
        if item.num_bytes > self._max_bytes:
            return
        key = digest, _shown(counts) if depends_on_counts else ""
        with self._lock:
            if generation != self.generation:
                return
            if key in self._items:
                self.num_bytes -= self._items.pop(key).num_bytes
            self._items[key] = item
            self.num_bytes += item.num_bytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._items.popitem(last=False)
                self.num_bytes -= oldest.num_bytes

    def clear(self) -> None:
        """Drops all items, and those that are in work when they are added."""
        with self._lock:
            self.generation += 1
            self._items.clear()
            self.num_bytes = 0


def digest_source(source: MediaSource, kwargs: bytes, uuid: str | None, cache_salt: str | None = None) -> bytes:
    """A hash of all that the processed item depends on, beside the other items of the prompt.

    Args:
        kwargs: JSON of the arguments of the processor for the request.
        uuid: The user's name of the content, in place of its bytes.
        cache_salt: Only prompts with the same salt share processed items.
    """
    digest = hashlib.sha256(msgspec.msgpack.encode([source.modality, kwargs, uuid, cache_salt]))
    if uuid is None:
        digest.update(
            msgspec.msgpack.encode([source.form, source.dtype, source.shape, source.sampling_rate, source.fps])
        )
        digest.update(source.data)
    return digest.digest()


def _shown(counts: Mapping[str, int]) -> str:
    return repr(sorted(counts.items()))
