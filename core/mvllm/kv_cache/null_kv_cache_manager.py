"""For models that keep nothing of a prompt: every request has room, and takes no block."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager


class NullKVCacheManager(KVCacheManager):
    """Hands out no blocks.

    Args:
        max_model_len: Longest prompt in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(num_blocks=1, block_size=max_model_len, enable_caching=False)  # a block that nobody gets

    def allocate_slots(
        self,
        table: BlockTable,
        num_tokens: int,
        computed_blocks: Sequence[int] = (),
        *,
        num_spare: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int]:
        """No blocks, which is enough."""
        table.num_slots = num_tokens
        return []
