"""How much memory of a KV cache an engine can use, for programs that allocate all of it at once."""

from __future__ import annotations

from mvllm.extension_api.worker import MIN_SNAPSHOT_TOKENS
from mvllm.plugin_api import EngineConfig, KVCacheNeeds

_LEAST_TOKENS, _LEAST_SLOTS = 1 << 16, 64
"""For prefix caching with few sequences or short ones."""


def useful_kv_bytes(config: EngineConfig, needs: KVCacheNeeds) -> int:
    """Twice the bytes that `max_num_seqs` requests of `max_model_len` tokens take: in use, and for prefix caching.

    Blocks and snapshots of states share the memory in a fixed ratio, so all these tokens have snapshots.
    """
    num_seqs, block_size = config.scheduler.max_num_seqs, max(needs.block_sizes, default=1)
    blocks = -(-config.model.max_model_len // block_size) + 1
    tokens = max(2 * num_seqs * blocks * block_size, _LEAST_TOKENS)
    slots = max(4 * num_seqs, _LEAST_SLOTS)
    if needs.bytes_per_token and config.cache.enable_prefix_caching:
        interval = max(config.cache.state_snapshot_interval, MIN_SNAPSHOT_TOKENS)
        slots = max(slots, num_seqs + -(-tokens // interval))
    return tokens * needs.bytes_per_token + slots * needs.state_bytes + needs.fixed_state_bytes
