"""How much memory of a KV cache an engine can use, for programs that allocate all of it at once."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.platform.worker_protocol import KVCacheNeeds

_LEAST_TOKENS, _LEAST_SLOTS = 1 << 16, 64
"""For prefix caching with few sequences or short ones."""


def useful_kv_bytes(config: EngineConfig, needs: KVCacheNeeds) -> int:
    """Twice the bytes that `max_num_seqs` requests of `max_model_len` tokens take: in use, and for prefix caching."""
    num_seqs, block_size = config.scheduler.max_num_seqs, max(needs.block_sizes, default=1)
    blocks = -(-config.model.max_model_len // block_size) + 1
    tokens = max(2 * num_seqs * blocks * block_size, _LEAST_TOKENS)
    slots = max(4 * num_seqs, _LEAST_SLOTS)
    return tokens * needs.bytes_per_token + slots * needs.state_bytes + needs.fixed_state_bytes
