"""Host blocks and KV connectors of one engine core: their sizes, their namespace, and the measured rate of copies.

    KV cache on the devices  <── plans ──>  host blocks (HostTier, HostKVCache)  <── threads ──>  connectors

With `kv_offloading_size` the host blocks are a tier of their own; without it they are a buffer of connectors.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.config.kv_transfer import KVConnectorConfig
from mvllm.config.model import ModelConfig
from mvllm.config.model_fingerprint import weights_fingerprint
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.core.kv_connectors import make_connectors
from mvllm.errors import CacheError, ConfigError
from mvllm.executor.interface import Executor
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_transfer.connector import KVConnectorContext
from mvllm.kv_transfer.host_kv_cache import HostKVCache
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.worker_protocol import HostBlockNeeds
from mvllm.scheduler.swapping import CopyCosts

logger = get_logger(__name__)

FORMAT_VERSION = 2
"""Version of what connectors store. Engines of different versions do not share blocks: those of version 1 may have
stored blocks whose contents were loaded from host memory before they had arrived there."""

BUFFER_BYTES = 2**30
"""Most bytes of host blocks that are only a buffer of connectors. Pages that are never used take no memory."""

_BYTES_SAVED_PER_STEP = 32 * 2**20
"""A step saves about so many bytes besides those of evicted blocks: a few milliseconds."""

_MEASURED_BYTES = 64 * 2**20
_MOST_MEASURED = 64


class KVTiers:
    """The host blocks of an engine, mapped on its workers, and its connectors.

    Args:
        config: The engine's configuration, with `kv_transfer` settings.
        executor: Its workers, which have allocated their KV cache.
        summary: The size of the KV cache.

    Attributes:
        tier: The index of the host blocks, for the KV cache manager.
        connectors: The stores.
        namespace: 32 bytes; root of all block hashes.
        costs: Bytes of blocks, and the rate of copies once it was measured.

    Raises:
        CacheError: The host blocks do not fit into memory, or workers cannot map them.
        ConfigError: A connector cannot be created.
    """

    def __init__(self, config: EngineConfig, executor: Executor, summary: KVCacheSummary) -> None:
        self._executor = executor
        needs: list[HostBlockNeeds] = executor.collective_rpc("host_block_needs")
        block_bytes, state_bytes = [need.block_bytes for need in needs], [need.state_bytes for need in needs]
        self.costs = CopyCosts(sum(block_bytes), sum(state_bytes))
        transfer = config.kv_transfer
        num_blocks, num_states = count_host_blocks(
            transfer.offloading_bytes or BUFFER_BYTES,
            sum(block_bytes),
            sum(state_bytes) if summary.num_state_slots else 0,
            summary,
            longest=not transfer.offloading_bytes,
        )
        self._blocks = HostKVCache(num_blocks, block_bytes)
        self._states = HostKVCache(num_states, state_bytes) if num_states else None
        try:
            executor.collective_rpc(
                "map_host_blocks",
                (
                    self._blocks.path if sum(block_bytes) else "",
                    num_blocks,
                    block_bytes,
                    "" if self._states is None else self._states.path,
                    num_states,
                    state_bytes,
                ),
            )
        except CacheError as e:
            raise CacheError(
                f"A worker cannot map the host blocks of the engine, which needs all workers on this machine: {e}"
            ) from e
        parts = namespace_parts(config, summary, needs)
        self.namespace = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
        engine_id = os.urandom(8).hex()

        def make_context(connector: KVConnectorConfig) -> KVConnectorContext:
            return KVConnectorContext(
                self.namespace,
                engine_id,
                connector.role,
                self._blocks,
                self._states,
                connector.options,
                namespace_parts=parts,
            )

        self.connectors = make_connectors(transfer.connectors, make_context)
        saves = bool(transfer.offloading_bytes) or self.connectors.can_save
        self.tier = HostTier(
            num_blocks,
            num_states,
            max_saved_blocks=max(1, _BYTES_SAVED_PER_STEP // max(1, sum(block_bytes))) if saves else 0,
            max_saved_states=max(1, _BYTES_SAVED_PER_STEP // max(1, sum(state_bytes))) if saves else 0,
            saves_evicted=bool(transfer.offloading_bytes),
        )
        self.preemption_mode = transfer.preemption_mode if transfer.offloading_bytes else "recompute"
        logger.info(
            "Host blocks: %s blocks of %s bytes%s; connectors: %s",
            f"{num_blocks:,}",
            f"{sum(block_bytes):,}",
            f" and {num_states:,} states of {sum(state_bytes):,} bytes" if num_states else "",
            ", ".join(self.connectors.names) or "none",
        )

    @property
    def scheduler_arguments(self) -> dict[str, Any]:
        """Arguments of the Scheduler."""
        return {
            "connectors": self.connectors,
            "preemption_mode": self.preemption_mode,
            "copy_costs": self.costs,
        }

    def measure_copies(self, summary: KVCacheSummary) -> int:
        """Measures the rate of copies with plans that save some blocks and load them again, before any request.

        Returns:
            The number of plans that were executed, from step 0 on.
        """
        if not self.costs.block_bytes or self.preemption_mode != "auto":
            return 0
        count = max(1, min(_MEASURED_BYTES // self.costs.block_bytes, _MOST_MEASURED))
        count = min(count, summary.num_blocks, self._blocks.num_blocks)
        blocks, seconds = list(range(count)), float("inf")
        for i in range(2):  # the first one touches the memory
            plan = SchedulerOutput(
                step=i,
                saved_blocks=blocks,
                saved_host_blocks=blocks,
                loaded_blocks=blocks,
                loaded_host_blocks=blocks,
            )
            started = time.perf_counter()
            self._executor.execute_model(plan).result()
            seconds = min(seconds, time.perf_counter() - started)
        num_bytes = 2 * count * self.costs.block_bytes
        self.costs = CopyCosts(self.costs.block_bytes, self.costs.state_bytes, num_bytes / max(seconds, 1e-9))
        return 2


def count_host_blocks(
    num_bytes: int, block_bytes: int, state_bytes: int, summary: KVCacheSummary, *, longest: bool
) -> tuple[int, int]:
    """The numbers of host blocks and of host blocks for states that fit into so many bytes.

    Args:
        num_bytes: Bytes of host memory.
        block_bytes, state_bytes: Bytes of one, of all ranks; `state_bytes` is 0 in models without sequence states.
        summary: The size of the KV cache on the devices; states and blocks have its ratio.
        longest: At least the blocks of one sequence of the longest length, also if they need more bytes.

    Raises:
        ConfigError: Not even one fits.
    """
    least = summary.blocks_per_request if longest else 1
    if not state_bytes:
        num_blocks = max(num_bytes // block_bytes, least if longest else 0) if block_bytes else summary.num_blocks
        if num_blocks < 1:
            raise ConfigError(
                f"kv_offloading_size gives {num_bytes:,} bytes, but a block has {block_bytes:,}. Set it to at least "
                f"{block_bytes / 2**30:.3g}."
            )
        return num_blocks, 0
    ratio = max(1, -(-summary.num_blocks // max(1, summary.num_state_slots)))  # blocks per state
    num_states = num_bytes // (state_bytes + ratio * block_bytes)
    least_bytes = state_bytes + ratio * block_bytes
    if num_states < 1 and not longest:
        raise ConfigError(
            f"kv_offloading_size gives {num_bytes:,} bytes, but a state and its blocks have "
            f"{least_bytes:,}. Set it to at least {least_bytes / 2**30:.3g}."
        )
    num_states = max(1, num_states)
    return max(least, num_states * ratio), num_states


def namespace_parts(config: EngineConfig, summary: KVCacheSummary, needs: Sequence[HostBlockNeeds]) -> dict[str, str]:
    """What decides the bytes of a block, besides its tokens, by name."""
    parallel = config.parallel
    draft = None if config.speculative is None else config.speculative.model
    return {
        "format_version": str(FORMAT_VERSION),
        "model": _describe_model(config.model, config),
        "weights": _weights(config.model, config),
        "draft_model": "" if draft is None else f"{_describe_model(draft, config)} {_weights(draft, config)}",
        "kv_cache_dtype": config.cache.dtype,
        "block_size": str(summary.block_size),
        "windows": str(summary.windows),
        "ranks": f"tensor {parallel.tensor_parallel_size}, pipeline {parallel.pipeline_parallel_size}",
        "block_format": "\n".join(f"{need.block_bytes} {need.state_bytes} {need.block_format}" for need in needs),
    }


def _describe_model(model: ModelConfig, config: EngineConfig) -> str:
    settings = json.dumps(model.hf_config.as_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(settings.encode("utf-8", "surrogatepass")).hexdigest()
    facts = model.architecture, model.dtype, model.quantization, model.model_impl, model.max_model_len, config.platform
    return f"config {digest}, {', '.join(map(str, facts))}"


def _weights(model: ModelConfig, config: EngineConfig) -> str:
    if config.load.load_format == "dummy":
        return f"random, seed {model.weights_seed}"
    try:
        return weights_fingerprint(model.path)
    except OSError as e:
        raise ConfigError(f"The weights in {model.path} cannot be read for their hash: {e}") from e
