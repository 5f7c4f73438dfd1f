"""Preemption by swapping: the keys and values of a preempted request stay in host memory until it runs again.

Its full blocks are pinned in host blocks: those that are there already, and those that the plan of the preemption saves
before anything overwrites them. When the request is admitted again it finds them as a prefix, and the plan loads them.
At most the tokens of one block, and those of steps in flight, are computed again. In models with sequence states the
request goes on from its last snapshot.

    auto      swap if copying takes less time than computing the tokens again
    swap      swap if there is room for all blocks
    recompute never
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.host_tier import HostTier, PoolTier
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_cache.prefix_search import group_hash
from mvllm.scheduler.request import Request
from mvllm.scheduler.step_time_model import StepTimeModel

AUTO, RECOMPUTE, SWAP = "auto", "recompute", "swap"
PREEMPTION_MODES = (AUTO, RECOMPUTE, SWAP)


@dataclass(frozen=True)
class CopyCosts:
    """What copies between the device and host memory cost.

    Attributes:
        block_bytes, state_bytes: Bytes of a KV block and of a sequence state, of all ranks.
        bytes_per_second: The measured rate of copies; 0 if it is not known.
    """

    block_bytes: int = 0
    state_bytes: int = 0
    bytes_per_second: float = 0.0

    def seconds(self, num_blocks: int, num_states: int) -> float:
        """The time of copies."""
        num_bytes = num_blocks * self.block_bytes + num_states * self.state_bytes
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0


NO_COSTS = CopyCosts()
"""Of copies that were not measured."""


class _Parts:
    """The blocks and the snapshot of one request.

    Attributes:
        num_tokens: Tokens that need not be computed again.
        present: Host blocks that have them.
        unsaved: Tier, block and key of the others.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.present: list[tuple[PoolTier, int]] = []
        self.unsaved: list[tuple[PoolTier, int, bytes]] = []


class Swapper:
    """Swaps requests out. Used by the step planner.

    Args:
        mode: One of PREEMPTION_MODES but `recompute`.
        kv_cache: Has a host tier.
        costs: Measured costs of copies.
        step_times: Measured times of prompt tokens; None to swap whenever there is room.
    """

    def __init__(
        self,
        mode: str,
        kv_cache: KVCacheManager,
        costs: CopyCosts,
        step_times: StepTimeModel | None = None,
    ) -> None:
        assert kv_cache.tier is not None
        self._kv_cache = kv_cache
        self._tier: HostTier = kv_cache.tier
        self._costs = costs
        self._step_times = step_times if mode == AUTO else None

    def swap_out(self, request: Request) -> bool:
        """Keeps the blocks of a running request, which is preempted next, in host memory.

        Returns:
            False, with nothing changed, if its tokens have to be computed again.
        """
        found = []
        for side in request.sides:
            self._kv_cache.cache_blocks(side.table, side.num_computed_tokens)
            parts = self._find_parts(side.table)
            if parts is None:
                return False
            found.append((side.table, parts))
        if not self._is_cheaper([parts for _, parts in found]):
            return False
        for table, parts in found:
            for place in parts.present:
                self._tier.pin_for(table, *place)
        if not self._has_room([parts for _, parts in found]):
            for table, _ in found:
                self._tier.release(table)
            return False
        for table, parts in found:
            for tier, block, key in parts.unsaved:
                index = tier.host.get(key)  # the other side of a pair may have the same block
                if index is None:
                    index = tier.save(block, key)
                assert index is not None
                self._tier.pin_for(table, tier, index)
        return True

    def _has_room(self, parts: list[_Parts]) -> bool:
        return all(
            sum(each is tier for some in parts for each, _, _ in some.unsaved) <= tier.host.num_available
            for tier in self._tier.tiers
        )

    def _is_cheaper(self, parts: list[_Parts]) -> bool:
        """Whether copying the parts takes less time than computing their tokens, as far as both are known."""
        seconds_per_token = None if self._step_times is None else self._step_times.seconds_per_prompt_token
        if seconds_per_token is None:
            return True
        out = [tier.is_state for some in parts for tier, _, _ in some.unsaved]
        back = out + [tier.is_state for some in parts for tier, _ in some.present]
        num_states = sum(out) + sum(back)
        seconds = self._costs.seconds(len(out) + len(back) - num_states, num_states)
        return seconds < seconds_per_token * sum(some.num_tokens for some in parts)

    def _find_parts(self, table: BlockTable) -> _Parts | None:
        """The longest prefix of which all parts are in host blocks or can be saved; None if there is none."""
        kv_cache = self._kv_cache
        length = table.num_hashed_blocks
        if table.root is None or not length:
            return None
        hashes = table.block_hashes[:length]
        lengths = iter((length,)) if kv_cache.states is None else kv_cache.states.snapshot_lengths(hashes)
        for length in lengths:
            while length:
                parts = _Parts(length * kv_cache.block_size)
                missing = None
                for group, i in kv_cache.search.needed(length):
                    if not self._add_part(parts, self._tier.blocks, group_hash(hashes[i], group)):
                        missing = i
                        break
                if missing is None:
                    has_state = self._tier.states is None or self._add_part(
                        parts, self._tier.states, hashes[length - 1]
                    )
                    if has_state:
                        return parts
                length = missing if missing is not None and kv_cache.states is None else 0
        return None

    def _add_part(self, parts: _Parts, tier: PoolTier, key: bytes) -> bool:
        """Adds the place of some contents. False if they are nowhere, or may be wrong."""
        if (index := tier.host.get(key)) is not None:
            parts.present.append((tier, index))
            return True
        block = tier.pool.get_cached_block(key)
        if block is None or not tier.is_confirmed(block) or tier.host.get_filling(key) is not None:
            return False
        parts.unsaved.append((tier, block, key))
        return True
