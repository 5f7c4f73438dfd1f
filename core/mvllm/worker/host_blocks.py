"""Copies KV blocks and sequence states of one rank between the device and host blocks, as the plans of steps say.

A host block has the bytes of one KV block in every cache of a rank, one cache after the other:

    one host block   rank 0's part                        | rank 1's part ...
                     cache of layer 0 | cache of layer 1 ... |

Layers of different KV cache groups share caches and use different blocks of them, so a host block holds a block of any
group. The bytes of caches that the block's group does not use are copied too.

A step's saves are submitted first, then its loads, then the model's work: in this order the device executes them. A
save reads what earlier steps have stored in a block, even if this step overwrites it.

A save fills its host blocks when it is waited for, which is when the step's output is collected. With asynchronous
scheduling the next step is submitted before that. If it loads one of these host blocks, it waits for the save first:

    step 5          save 4 -> host 0 submitted ............................ collected: other saves of 5 are waited for
    step 6                                       waits for host 0, load it
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
    """Submitted copies that may not be done yet."""

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

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._pending

    def wait(self) -> None:
        """Waits for all copies. Idempotent."""
        pending, self._pending = self._pending, []
        for transfer, finish in pending:
            transfer.wait()
            finish()


class _HostRows:
    """This rank's part of the host blocks of one kind, and the saves that have not filled theirs yet.

    Attributes:
        bytes: uint8 [host blocks, bytes of this rank]; None before they are mapped.
    """

    def __init__(self) -> None:
        self.bytes: np.ndarray | None = None
        self._saves: list[tuple[frozenset[int], StepCopies]] = []  # host blocks and the copies to them, oldest first

    def save(self, parts: Sequence[CopiedRows], rows: list[int], host_rows: list[int]) -> StepCopies:
        """Submits copies of rows of the device to host blocks."""
        copies = StepCopies()
        if not rows:
            return copies
        self._wait_for_saves(host_rows)  # of a former save to one of these the end would undo this one
        on_device, on_host = np.array(rows, np.int64), np.array(host_rows, np.int64)
        for part, columns in self._columns(parts, rows, host_rows):
            found = np.empty((len(rows), part.num_bytes), np.uint8)

            def store(columns: np.ndarray = columns, found: np.ndarray = found) -> None:
                columns[on_host] = found

            copies.add(part.save(on_device, found), store)
        self._saves = [save for save in self._saves if not save[1].is_done]
        if not copies.is_done:
            self._saves.append((frozenset(host_rows), copies))
        return copies

    def load(self, parts: Sequence[CopiedRows], rows: list[int], host_rows: list[int]) -> StepCopies:
        """Submits copies of host blocks to rows of the device, once the host blocks are filled."""
        copies = StepCopies()
        if not rows:
            return copies
        self._wait_for_saves(host_rows)
        on_device, on_host = np.array(rows, np.int64), np.array(host_rows, np.int64)
        for part, columns in self._columns(parts, rows, host_rows):
            copies.add(part.load(on_device, columns[on_host]), _nothing)
        return copies

    def _wait_for_saves(self, host_rows: list[int]) -> None:
        """Waits for the saves, of this step or of earlier ones, to any of these host blocks."""
        for saved, copies in self._saves:
            if not saved.isdisjoint(host_rows):
                copies.wait()

    def _columns(
        self, parts: Sequence[CopiedRows], rows: list[int], host_rows: list[int]
    ) -> Iterator[tuple[CopiedRows, np.ndarray]]:
        """Each part with its columns of the host blocks, which are views."""
        if not parts:
            return
        assert self.bytes is not None, "map_host_blocks has not been called"
        assert len(rows) == len(host_rows), "a plan names one host block for each block"
        start = 0
        for part in parts:
            yield part, self.bytes[:, start : start + part.num_bytes]
            start += part.num_bytes


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
        self._blocks, self._states = _HostRows(), _HostRows()

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
        blocks = HostKVCache(num_blocks, rank_bytes, path).part(self._rank) if path else None
        states = HostKVCache(num_states, state_rank_bytes, states_path).part(self._rank) if states_path else None
        self._blocks.bytes, self._states.bytes = blocks, states

    def start(self, plan: SchedulerOutput) -> StepCopies:
        """Submits the copies of a plan: saves, then loads. Host blocks are complete after `StepCopies.wait`.

        Waits for the saves to host blocks that the plan uses, if they were not waited for, and for no others.
        """
        blocks = self._layers.copied_blocks(self._block_size) if plan.saved_blocks or plan.loaded_blocks else ()
        slots = self._layers.copied_slots() if plan.saved_states or plan.loaded_states else ()
        copies = StepCopies()
        for submitted in (
            self._blocks.save(blocks, plan.saved_blocks, plan.saved_host_blocks),
            self._states.save(slots, plan.saved_states, plan.saved_host_states),
            self._blocks.load(blocks, plan.loaded_blocks, plan.loaded_host_blocks),
            self._states.load(slots, plan.loaded_states, plan.loaded_host_states),
        ):
            copies.add(submitted, _nothing)
        return copies


def _nothing() -> None:
    """What is left to do at the end of a load, whose array is a copy of the host blocks."""
