"""The number of KV cache blocks: as many as the memory allows.

Blocks that running requests do not need hold the prefix cache. Without prefix caching there are at most as many blocks
as running requests can use.

All workers hold the same blocks, each for its own layers and heads, so the worker with the least memory decides. With
several KV cache groups (`kv_cache_groups.py`) a request has blocks in each group, in groups with a window only those
inside the window.

In models with sequence states the memory also holds state slots (`state_slot_sizing.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.config.engine_config import EngineConfig
from mvllm.config.sliding_window_blocks import max_blocks_held
from mvllm.engine.core.kv_cache_groups import bytes_per_block, choose_group_windows
from mvllm.engine.core.state_slot_sizing import MIN_SLOTS, StateNeeds, divide_memory
from mvllm.errors import CacheError
from mvllm.logging import get_logger
from mvllm.platform.worker_protocol import KVCacheNeeds

logger = get_logger(__name__)

_MAX_SLOTS = 2**31 - 1
"""Slot indices have 32 bits."""

_SHORTEST_AUTO_LEN = 2
"""A token of the prompt and one of the output."""


@dataclass(frozen=True)
class KVCacheSummary:
    """The size of the KV cache.

    Attributes:
        num_blocks: Blocks on every worker.
        block_size: Tokens per block.
        total_bytes: Bytes on the worker with the most.
        max_model_len: Longest sequence, in tokens.
        windows: The window of each KV cache group in tokens, None for full attention.
        max_step_tokens: Most tokens of one request in one step.
        limit: The setting that limits the number of blocks.
        num_state_slots: State slots on every worker; 0 for models without sequence states.
    """

    num_blocks: int
    block_size: int
    total_bytes: int
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)
    max_step_tokens: int = 1
    limit: str = ""
    num_state_slots: int = 0

    @property
    def blocks_per_request(self) -> int:
        """The most blocks that a request of the longest length holds at once."""
        return max_blocks_of_sequence(self.max_model_len, self.block_size, self.windows, self.max_step_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, in requests of the longest length."""
        return (
            self.num_blocks
            * max_blocks_of_sequence(self.max_model_len, self.block_size)
            * self.block_size
            // self.blocks_per_request
        )

    @property
    def max_concurrency(self) -> float:
        """Requests of the longest length that fit at once."""
        fitting = self.num_blocks / self.blocks_per_request
        return min(fitting, self.num_state_slots) if self.num_state_slots else fitting

    def __str__(self) -> str:
        if not self.num_blocks:
            return "KV cache: none, because the model is an encoder"
        slots = f" and {self.num_state_slots:,} state slots" if self.num_state_slots else ""
        return (
            f"KV cache: {self.num_tokens:,} tokens ({self.num_blocks:,} blocks of {self.block_size}{slots}, "
            f"{_format_bytes(self.total_bytes)}), enough for {self.max_concurrency:,.1f} concurrent requests of "
            f"{self.max_model_len:,} tokens" + (f"; sized by {self.limit}" if self.limit else "")
        )


def no_kv_cache(max_model_len: int) -> KVCacheSummary:
    """The summary for an encoder, which has no KV cache: one block per sequence in the block table, and no memory."""
    return KVCacheSummary(0, max_model_len, 0, max_model_len)


def max_blocks_of_sequence(
    num_tokens: int, block_size: int, windows: Sequence[int | None] = (None,), max_step_tokens: int = 1
) -> int:
    """The most blocks that a request of `num_tokens` tokens holds at once, in all groups of layers together."""
    return sum(max_blocks_held(num_tokens, window, block_size, max_step_tokens) for window in windows)


def choose_block_size(config: EngineConfig, needs: Sequence[KVCacheNeeds]) -> int:
    """The configured block size, or the first one that all workers accept.

    Raises:
        CacheError: A worker does not accept it, or no block size is accepted by all.
    """
    common = [size for size in needs[0].block_sizes if all(size in n.block_sizes for n in needs)]
    configured = config.cache.block_size
    if configured is None and common:
        return common[0]
    if configured not in common:
        accepted = ", ".join(map(str, common)) or "none"
        raise CacheError(f"block_size {configured} was asked for, but the attention backend accepts {accepted}.")
    return configured


class _TooSmallError(CacheError):
    """One sequence does not fit, but one of `fits` tokens would; 0 if none would."""

    def __init__(self, message: str, fits: int) -> None:
        super().__init__(message)
        self.fits = fits


def size_kv_cache(config: EngineConfig, needs: Sequence[KVCacheNeeds], available: Sequence[int]) -> KVCacheSummary:
    """Divides the available bytes into blocks.

    With `ModelConfig.max_model_len_is_auto`, the longest sequence of the result is the longest that fits, and the log
    says so. Layers are grouped as for the model's own length, by which the workers group them.

    Args:
        needs: Bytes per token and accepted block sizes, per worker.
        available: Bytes for the KV cache, and for state slots, per worker.

    Raises:
        CacheError: Not even one sequence of `max_model_len`, or with auto of two tokens, fits; the error names the
            bytes needed and a length that fits.
    """
    own_len, is_auto = config.model.max_model_len, config.model.max_model_len_is_auto
    try:
        summary = _size_for(config, needs, available, own_len)
    except _TooSmallError as e:
        if not is_auto or e.fits < _SHORTEST_AUTO_LEN:
            raise CacheError(str(e)) from None
        summary = _size_for(config, needs, available, e.fits)
    if not is_auto:
        return summary
    found, size = summary.max_model_len, _format_bytes(summary.total_bytes)
    logger.info(
        "max_model_len auto: %s of the model's %s tokens fit in the KV cache (%s)", f"{found:,}", f"{own_len:,}", size
    )
    return summary


def _size_for(
    config: EngineConfig, needs: Sequence[KVCacheNeeds], available: Sequence[int], max_len: int
) -> KVCacheSummary:
    """As `size_kv_cache`, for sequences of `max_len` tokens."""
    block_size = choose_block_size(config, needs)
    own_len, max_step_tokens = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    windows = choose_group_windows(needs, own_len)
    costs = [bytes_per_block(need, windows, own_len, block_size) for need in needs]
    longest = max_blocks_of_sequence(max_len, block_size, windows, max_step_tokens)
    if any(need.state_bytes for need in needs):
        state_needs = StateNeeds(
            [need.state_bytes for need in needs],
            costs,
            block_size,
            longest,
            config.scheduler.max_num_seqs,
            config.cache.state_snapshot_interval,
            config.cache.enable_prefix_caching,
            _most_draft_slots(config),
        )
        return _size_with_states(config, needs, state_needs, available, windows, max_len)
    affordable = min(max(0, free) // cost for free, cost in zip(available, costs, strict=True))
    num_blocks, limit = min(affordable, _MAX_SLOTS // block_size), _memory_limit(config)
    usable = config.scheduler.max_num_seqs * max_blocks_of_sequence(max_len, block_size) * len(windows)
    if not config.cache.enable_prefix_caching and usable < num_blocks:
        num_blocks, limit = usable, f"max_num_seqs {config.scheduler.max_num_seqs}, without prefix caching"
    if num_blocks < longest:
        fits = _longest_that_fits(num_blocks, max_len, block_size, windows, max_step_tokens)
        raise _too_small_error(config, needs, available, [longest * cost for cost in costs], fits)
    return KVCacheSummary(num_blocks, block_size, num_blocks * max(costs), max_len, windows, max_step_tokens, limit)


def _most_draft_slots(config: EngineConfig) -> int:
    """State slots of a sequence behind draft tokens: with asynchronous scheduling those of two steps."""
    if config.speculative is None:
        return 0
    return config.speculative.num_speculative_tokens * (2 if config.scheduler.async_scheduling else 1)


def _size_with_states(
    config: EngineConfig,
    needs: Sequence[KVCacheNeeds],
    state_needs: StateNeeds,
    available: Sequence[int],
    windows: tuple[int | None, ...],
    max_len: int,
) -> KVCacheSummary:
    """Divides the available bytes into blocks and state slots, see `size_kv_cache`."""
    max_step_tokens = config.scheduler.max_num_batched_tokens
    block_size, costs = state_needs.block_size, state_needs.block_bytes
    fixed = [need.fixed_state_bytes for need in needs]
    num_slots, num_blocks = divide_memory(
        state_needs, [free - held for free, held in zip(available, fixed, strict=True)]
    )
    if num_slots < MIN_SLOTS or num_blocks < state_needs.longest:
        fits = _longest_that_fits(num_blocks, max_len, block_size, windows, max_step_tokens) if any(costs) else 0
        required = [least + held for least, held in zip(state_needs.min_bytes, fixed, strict=True)]
        raise _too_small_error(config, needs, available, required, fits)
    num_blocks, limit = min(num_blocks, _MAX_SLOTS // block_size), _memory_limit(config)
    usable = config.scheduler.max_num_seqs * max_blocks_of_sequence(max_len, block_size) * len(windows)
    if not config.cache.enable_prefix_caching and usable < num_blocks:
        num_blocks, limit = usable, f"max_num_seqs {config.scheduler.max_num_seqs}, without prefix caching"
    total = max(
        num_blocks * cost + num_slots * need.state_bytes + need.fixed_state_bytes
        for cost, need in zip(costs, needs, strict=True)
    )
    return KVCacheSummary(num_blocks, block_size, total, max_len, windows, max_step_tokens, limit, num_slots)


def _memory_limit(config: EngineConfig) -> str:
    """The setting that limits the cache's memory, for the log line."""
    if config.cache.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    return f"memory_utilization {config.cache.memory_utilization} (or set kv_cache_memory_bytes)"


def _longest_that_fits(
    num_blocks: int, max_model_len: int, block_size: int, windows: Sequence[int | None], max_step_tokens: int
) -> int:
    """The largest whole number of blocks, in tokens, that a request may have; less than `max_model_len`."""
    fitting = range(1, max_blocks_of_sequence(max_model_len, block_size))
    return block_size * bisect_right(
        fitting,
        num_blocks,
        key=lambda pages: max_blocks_of_sequence(pages * block_size, block_size, windows, max_step_tokens),
    )


def _too_small_error(
    config: EngineConfig,
    needs: Sequence[KVCacheNeeds],
    available: Sequence[int],
    required_by: Sequence[int],
    fits: int,
) -> _TooSmallError:
    max_len = config.model.max_model_len
    tightest = min(range(len(needs)), key=lambda i: available[i] / required_by[i])
    required, found = required_by[tightest], available[tightest]
    per_token, state = needs[tightest].bytes_per_token, needs[tightest].state_bytes
    each = f"{per_token:,} bytes per token" if per_token or not state else ""
    if state:
        each += f"{' and ' if each else ''}{MIN_SLOTS} state slots of {state:,} bytes"
        if fixed := needs[tightest].fixed_state_bytes:
            each += f", and {fixed:,} bytes of states beside the slots"
    need = f"max_model_len {max_len:,} needs {_format_bytes(required)} of KV cache ({each})"
    if config.cache.kv_cache_memory_bytes is not None:
        limits = f"kv_cache_memory_bytes gives {_format_bytes(found)}"
        grow = f"raise kv_cache_memory_bytes to {required}"
    elif found <= 0:
        limits = (
            f"the weights and one step already take {_format_bytes(-found)} more than memory_utilization "
            f"{config.cache.memory_utilization} allows"
        )
        grow = "raise memory_utilization, free memory on the device, or use a smaller model"
    else:
        limits = f"memory_utilization {config.cache.memory_utilization} leaves {_format_bytes(found)}"
        grow = "raise memory_utilization, or give the KV cache its size with kv_cache_memory_bytes"
    shrink = f"set max_model_len to {fits} or less, or to auto, " if fits >= _SHORTEST_AUTO_LEN else ""
    return _TooSmallError(f"{need}, but {limits}. To fix it, {shrink}{'or ' if shrink else ''}{grow}.", fits)


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if abs(num_bytes) >= 2**28 else f"{num_bytes / 2**20:,.1f} MiB"
