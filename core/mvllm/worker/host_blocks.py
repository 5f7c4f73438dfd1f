"""Copies KV blocks and sequence states of one rank between the device and host blocks, as the plans of steps say.

A host block has the bytes of one KV block in every cache of a rank, one cache after the other:

    one host block   rank 0's part                        | rank 1's part ...
                     cache of layer 0 | cache of layer 1 ... |

Layers of different KV cache groups share caches and use different blocks of them, so a host block holds a block of any
group. The bytes of caches that the block's group does not use are copied too.

A step's saves are submitted first, then its loads, then the model's work: in this order the device executes them. A
save reads what earlier steps have stored in a block, even if this step overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mvllm.kv_transfer.host_kv_cache import HostKVCache
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.block_transfer import BlockTransfer
from mvllm.platform.worker_protocol import HostBlockNeeds

_Copy = Callable[[np.ndarray, np.ndarray], BlockTransfer | None]
"""Copies rows: int64 [n] on the device, and their bytes, uint8 [n, num_bytes] on the host."""


@dataclass(frozen=True)
class CopiedRows:
    """What one layer's cache, or its states, contribute to a host block.

    Attributes:
        num_bytes: Bytes of one block or slot.
        format: Describes these bytes, see `AttentionBackend.block_format`.
        save: Copies blocks or slots to the host.
        load: Copies them to the device.
    """

    num_bytes: int
    format: Callable[[], str]
    save: _Copy
    load: _Copy


class CopiedLayers(Protocol):
    """The layers whose blocks and states are copied."""

    def copied_blocks(self, block_size: int) -> Sequence[CopiedRows]:
        """The parts of a host block: one for each distinct cache. The caches must be allocated when they are used."""

    def copied_slots(self) -> Sequence[CopiedRows]:
        """The parts of a host block of states: one for each layer with a sequence state."""


class StepCopies:
    """The copies of one step that may not be done yet."""

    def __init__(self) -> None:
        self._pending: list[tuple[BlockTransfer, Callable[[], None]]] = []

    def add(self, transfer: BlockTransfer | None, finish: Callable[[], None]) -> None:
        """Adds a submitted copy.

        Args:
            transfer: Its handle; None if it is done.
            finish: What to do when it is done.
        """
        if transfer is None:
            finish()
        else:
            self._pending.append((transfer, finish))

    def wait(self) -> None:
        """Waits for all copies of the step."""
        pending, self._pending = self._pending, []
        for transfer, finish in pending:
            transfer.wait()
            finish()


class HostBlocks:
    """One rank's part of the host blocks.

    Args:
        rank: The worker's rank, which says where its part of a host block is.
        layers: The layers of all models of the rank.
        block_size: Tokens per KV block.
    """

    def __init__(self, rank: int, layers: CopiedLayers, block_size: int) -> None:
        self._rank = rank
        self._layers = layers
        self._block_size = block_size
        self._blocks: np.ndarray | None = None
        self._states: np.ndarray | None = None

    def needs(self) -> HostBlockNeeds:
        """Bytes and format of this rank's part. The caches must be allocated."""
        blocks, slots = self._layers.copied_blocks(self._block_size), self._layers.copied_slots()
        return HostBlockNeeds(
            block_bytes=sum(part.num_bytes for part in blocks),
            state_bytes=sum(part.num_bytes for part in slots),
            block_format="\n".join(part.format() for part in (*blocks, *slots)),
        )

    def map(
        self,
        path: str,
        num_blocks: int,
        rank_bytes: list[int],
        states_path: str,
        num_states: int,
        state_rank_bytes: list[int],
    ) -> None:
        """Opens the files, see `WorkerProtocol.map_host_blocks`.

        Raises:
            CacheError: A file cannot be mapped.
        """
        self._blocks = HostKVCache(num_blocks, rank_bytes, path).part(self._rank) if path else None
        self._states = HostKVCache(num_states, state_rank_bytes, states_path).part(self._rank) if states_path else None

    def start(self, plan: SchedulerOutput) -> StepCopies:
        """Submits the copies of a plan: saves, then loads. Host blocks are complete after `StepCopies.wait`."""
        copies = StepCopies()
        blocks = self._layers.copied_blocks(self._block_size) if plan.saved_blocks or plan.loaded_blocks else ()
        slots = self._layers.copied_slots() if plan.saved_states or plan.loaded_states else ()
        _save(copies, blocks, self._blocks, plan.saved_blocks, plan.saved_host_blocks)
        _save(copies, slots, self._states, plan.saved_states, plan.saved_host_states)
        if plan.loaded_blocks or plan.loaded_states:
            # A host block that this plan saves may be one that it loads.
            copies.wait()
        _load(copies, blocks, self._blocks, plan.loaded_blocks, plan.loaded_host_blocks)
        _load(copies, slots, self._states, plan.loaded_states, plan.loaded_host_states)
        return copies


def _save(
    copies: StepCopies,
    parts: Sequence[CopiedRows],
    host: np.ndarray | None,
    rows: list[int],
    host_rows: list[int],
) -> None:
    """Submits copies of rows of the device to rows of `host`."""
    on_device, on_host = np.array(rows, np.int64), np.array(host_rows, np.int64)
    for part, columns in _columns_of(parts, host, rows, host_rows):
        found = np.empty((len(rows), part.num_bytes), np.uint8)

        def store(columns: np.ndarray = columns, found: np.ndarray = found) -> None:
            columns[on_host] = found

        copies.add(part.save(on_device, found), store)


def _load(
    copies: StepCopies,
    parts: Sequence[CopiedRows],
    host: np.ndarray | None,
    rows: list[int],
    host_rows: list[int],
) -> None:
    """Submits copies of rows of `host` to rows of the device."""
    on_device, on_host = np.array(rows, np.int64), np.array(host_rows, np.int64)
    for part, columns in _columns_of(parts, host, rows, host_rows):
        copies.add(part.load(on_device, columns[on_host]), _nothing)


def _columns_of(
    parts: Sequence[CopiedRows], host: np.ndarray | None, rows: list[int], host_rows: list[int]
) -> Iterator[tuple[CopiedRows, np.ndarray]]:
    """Each part with its columns of `host`, which are views; none if there are no rows to copy."""
    if not rows or not parts:
        return
    assert host is not None, "map_host_blocks has not been called"
    assert len(rows) == len(host_rows), "a plan names one host block for each block"
    start = 0
    for part in parts:
        yield part, host[:, start : start + part.num_bytes]
        start += part.num_bytes


def _nothing() -> None:
    """A load has nothing to do at its end; the array is a copy of the host blocks."""
