"""KVCacheListener: what follows the contents of a KV cache on the device and in host memory."""

from __future__ import annotations

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_transfer.connector import BlockKey


class KVCacheListener:
    """Base of the listeners of a BlockPool, of HostBlockPool and of a HostTier, which do nothing by default.

    They must not change what they listen to, but for `block_reused`.
    """

    def block_stored(self, block: int, block_hash: BlockHash) -> None:
        """The block is cached under its hash from now on."""

    def block_reused(self, block: int, block_hash: BlockHash) -> None:
        """The block is about to lose its hash, because the next plan may write it. Host blocks may be allocated."""

    def block_evicted(self, block: int, block_hash: BlockHash) -> None:
        """The block loses its hash. Its contents are still there; the next plan may write it."""

    def all_evicted(self) -> None:
        """No block is cached any more."""

    def host_block_changed(self, key: BlockKey, is_stored: bool) -> None:
        """A host block has the contents of a key from now on, or has lost them."""

    def contents_discarded(self, keys: list[BlockKey]) -> None:
        """The contents of these keys may be wrong. They are forgotten."""

    def clearing(self) -> None:
        """All contents of host memory are about to be forgotten."""
