"""ItemMemory: limits the memory of the processed items of unfinished prompts in a front end.

Features of an image take megabytes, and are kept until their request ends: the engine core needs them again after a
preemption. So prompts wait here, in their order, before anything of them is fetched or decoded:

    reserve(items) ──wait──▶ ItemLease of an estimate ──decoded──▶ split ──request ends──▶ release

The estimate of an item follows the largest ones seen of its modality. A prompt that needs more than the limit waits
until it is alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mvllm.errors import RequestError
from mvllm.messages.multimodal import ArrayData, MultiModalItem

FIRST_ESTIMATE = 4 << 20
"""Bytes of an item before any of its modality was seen."""
_DECAY = 0.9

ItemSizes = Sequence[tuple[str, int]]
"""The (modality, bytes) of each item of a prompt."""


class ItemMemory:
    """Bytes of items, and the prompts that wait for some. May be used from any thread.

    Args:
        max_bytes: Most bytes of all leases together, unless there is only one.
        on_change: Called with `num_bytes` when it changes.

    Attributes:
        max_bytes: The argument.
        num_bytes: Bytes of all leases.
    """

    def __init__(self, max_bytes: int, on_change: Callable[[int], None] | None = None) -> None:
        self.max_bytes = max_bytes
        self._on_change = on_change
        self._lock = threading.RLock()  # a lease may be collected, and so released, in any line
        self._waiting: deque[tuple[Future[ItemLease], Mapping[str, int]]] = deque()
        self._estimates: dict[str, float] = {}
        self._num_leases = 0
        self._is_closed = False
        self.num_bytes = 0

    def reserve(self, counts: Mapping[str, int]) -> Future[ItemLease]:
        """A lease for prompts that are prepared together; done when there is room.

        Cancel the future to give up. A lease that nobody takes is released when it is collected.

        Args:
            counts: Number of their items by modality.

        Raises:
            RequestError: After `close`. The future has the same error then.
        """
        future: Future[ItemLease] = Future()
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._waiting.append((future, counts))
            self._admit()
        future.add_done_callback(self._on_done)
        return future

    @property
    def num_waiting(self) -> int:
        """Reservations that wait."""
        with self._lock:
            return sum(not future.cancelled() for future, _ in self._waiting)

    def close(self) -> None:
        """Fails all who wait. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting), deque()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())

    def _on_done(self, future: Future[ItemLease]) -> None:
        """A reservation that is given up may have kept those after it waiting."""
        if future.cancelled():
            with self._lock:
                self._admit()

    def _admit(self) -> None:
        while self._waiting:
            future, counts = self._waiting[0]
            size = int(sum(self._estimate(modality) * count for modality, count in counts.items()))
            if self._num_leases and self.num_bytes + size > self.max_bytes and not future.cancelled():
                return
            self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(ItemLease(self, size))

    def _estimate(self, modality: str) -> float:
        return self._estimates.get(modality, FIRST_ESTIMATE)

    def _replace(self, num_bytes: int, item_sizes: Sequence[ItemSizes]) -> list[ItemLease]:
        """Leases for prompts with items of these sizes, in place of one of `num_bytes`."""
        with self._lock:
            for modality, size in (each for sizes in item_sizes for each in sizes):
                decayed = _DECAY * self._estimate(modality) + (1 - _DECAY) * size
                self._estimates[modality] = max(size, decayed)
            self.num_bytes -= num_bytes
            self._num_leases -= 1
            found = [ItemLease(self, sum(size for _, size in sizes)) for sizes in item_sizes]
            self._admit()
        return found

    def _add(self, num_bytes: int, num_leases: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._num_leases += num_leases
            if self._on_change is not None:
                self._on_change(self.num_bytes)
            if num_bytes < 0 or num_leases < 0:
                self._admit()


class ItemLease:
    """Some of the memory, until `release` or until nobody has the lease any more.

    Attributes:
        num_bytes: Its size.
    """

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: ItemMemory, num_bytes: int) -> None:
        self._memory: ItemMemory | None = memory
        self.num_bytes = num_bytes
        memory._add(num_bytes, 1)

    def split(self, item_sizes: Sequence[ItemSizes]) -> list[ItemLease]:
        """A lease for each prompt, in place of this one.

        Args:
            item_sizes: Those of each prompt.
        """
        memory, self._memory = self._memory, None
        assert memory is not None, "a released lease"
        return memory._replace(self.num_bytes, item_sizes)

    def release(self) -> None:
        """Gives the memory back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory._add(-self.num_bytes, -1)

    def __del__(self) -> None:
        self.release()


class LeasedItems(list[MultiModalItem]):
    """The items of an expanded prompt, with the lease of their memory."""

    def __init__(self, items: Iterable[MultiModalItem], lease: ItemLease | None) -> None:
        super().__init__(items)
        self.lease = lease


@dataclass(frozen=True)
class LeasedArray:
    """Ready embeddings, with the lease of their memory."""

    array: ArrayData
    lease: ItemLease


def lease_of(prompt: Any) -> ItemLease | None:
    """The lease of a prompt that the engine has expanded or read; None for others."""
    for key in ("multi_modal_items", "prompt_embeds"):
        value = prompt.get(key) if isinstance(prompt, dict) else None
        if isinstance(value, LeasedItems | LeasedArray):
            return value.lease
    return None


def _closed() -> RequestError:
    return RequestError("The engine is shutting down.")
