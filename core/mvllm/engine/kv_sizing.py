"""How many KV blocks the engine gets: what the memory allows, but no more than it could ever use.

All workers hold the same blocks, each for its own layers and heads, so the worker with the least room decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import CacheError
from mvllm.platform.worker_protocol import KVCacheNeeds


@dataclass(frozen=True)
class CacheSummary:
    """The KV cache as it was sized.

    Attributes:
        num_blocks: Blocks, on every worker.
        block_size: Tokens per block.
        total_bytes: Bytes on the worker that holds most.
        max_model_len: Longest sequence.
    """

    num_blocks: int
    block_size: int
    total_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of the longest length that fit at once."""
        return self.num_blocks / blocks_for(self.max_model_len, self.block_size)

    def __str__(self) -> str:
        if not self.num_blocks:
            return "KV cache: none, as the model keeps nothing of a prompt"
        return (
            f"KV cache: {self.num_tokens:,} tokens ({self.num_blocks:,} blocks of {self.block_size}, "
            f"{_size(self.total_bytes)}), enough for {self.max_concurrency:,.1f} concurrent requests of "
            f"{self.max_model_len:,} tokens"
        )


def no_kv_cache(max_model_len: int) -> CacheSummary:
    """Of a model that keeps nothing of a prompt. A table of blocks has one place, for all of its tokens."""
    return CacheSummary(0, max_model_len, 0, max_model_len)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take."""
    return -(-num_tokens // block_size)


def choose_block_size(config: EngineConfig, needs: Sequence[KVCacheNeeds]) -> int:
    """The block size asked for, or the first that all workers accept.

    Raises:
        CacheError: The one asked for is not accepted, or there is none in common.
    """
    common = [size for size in needs[0].block_sizes if all(size in n.block_sizes for n in needs)]
    asked = config.cache.block_size
    if asked is None and common:
        return common[0]
    if asked not in common:
        accepted = ", ".join(map(str, common)) or "none"
        raise CacheError(f"block_size {asked} was asked for, but the attention backend accepts {accepted}.")
    return asked


def size_kv_cache(config: EngineConfig, needs: Sequence[KVCacheNeeds], available: Sequence[int]) -> CacheSummary:
    """Divides the available bytes into blocks.

    Args:
        needs: What one token costs, per worker.
        available: Bytes for the KV cache, per worker.

    Raises:
        CacheError: Not even one sequence of `max_model_len` fits; says how much is missing and what would fit.
    """
    block_size = choose_block_size(config, needs)
    limit, max_len = config.scheduler.max_num_seqs, config.model.max_model_len
    usable = limit * blocks_for(max_len, block_size)
    affordable = min(
        max(0, free) // (need.bytes_per_token * block_size) for free, need in zip(available, needs, strict=True)
    )
    num_blocks = min(usable, affordable)
    if num_blocks < blocks_for(max_len, block_size):
        raise _too_small(config, needs, available, num_blocks * block_size, block_size)
    most = max(need.bytes_per_token for need in needs)
    return CacheSummary(num_blocks, block_size, num_blocks * block_size * most, max_len)


def _too_small(
    config: EngineConfig, needs: Sequence[KVCacheNeeds], available: Sequence[int], fits: int, block_size: int
) -> CacheError:
    max_len = config.model.max_model_len
    tightest = min(range(len(needs)), key=lambda i: available[i] / needs[i].bytes_per_token)
    required = blocks_for(max_len, block_size) * block_size * needs[tightest].bytes_per_token
    found = available[tightest]
    per_token = needs[tightest].bytes_per_token
    asked = f"max_model_len {max_len:,} needs {_size(required)} of KV cache ({per_token:,} bytes per token)"
    if config.cache.kv_cache_memory_bytes is not None:
        limits = f"kv_cache_memory_bytes gives {_size(found)}"
        grow = f"raise kv_cache_memory_bytes to {required}"
    elif found <= 0:
        limits = (
            f"the weights and one step already take {_size(-found)} more than memory_utilization "
            f"{config.cache.memory_utilization} allows"
        )
        grow = "raise memory_utilization, free memory on the device, or use a smaller model"
    else:
        limits = f"memory_utilization {config.cache.memory_utilization} leaves {_size(found)}"
        grow = "raise memory_utilization, or give the KV cache its size with kv_cache_memory_bytes"
    shrink = f"set max_model_len to {fits} or less, or " if fits > 0 else ""
    return CacheError(f"{asked}, but {limits}. To mend it, {shrink}{grow}.")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if abs(num_bytes) >= 2**28 else f"{num_bytes / 2**20:,.1f} MiB"
