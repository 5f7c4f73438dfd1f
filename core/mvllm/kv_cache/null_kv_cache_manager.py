"""The KV cache manager of models without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager


class NullKVCacheManager(KVCacheManager):
    """KV cache manager of models without a KV cache: allocates no blocks, and every request fits.

    Args:
        max_model_len: Longest prompt in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(num_blocks=1, block_size=max_model_len, enable_caching=False)  # the block is never allocated

    def allocate_slots(
        self,
        table: BlockTable,
        num_tokens: int,
        computed_blocks: Sequence[int] = (),
        *,
        num_spare: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int]:
        """Returns no blocks."""
        table.num_slots = num_tokens
        return []
