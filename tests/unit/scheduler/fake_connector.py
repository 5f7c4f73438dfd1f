"""A connector whose store is a dict, with random delays, failures and evictions. It copies from and to a fake runner.

It checks that no plan in flight uses the host blocks that it fills or reads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mvllm.kv_transfer.connector import (
    BlockKey,
    HostBlock,
    KVConnector,
    KVConnectorContext,
    KVRequest,
    StoreChange,
    TransferResult,
)


class FakeConnector(KVConnector):
    """A store in this process.

    Args:
        store: Contents by key, which other connectors may share.
        dice: Decides what happens; None for a store in which nothing fails and every transfer ends at the next `poll`.

    Attributes:
        engine: The engine; set before the first step.
        saved, loaded: Keys of transfers that have ended well, in their order.
        finished: The arguments of `request_finished`.
        discarded: The keys of `discard`.
    """

    def __init__(self, store: dict[BlockKey, object] | None = None, dice: random.Random | None = None) -> None:
        super().__init__(KVConnectorContext(b"", "", "both", None))  # type: ignore[arg-type]
        self.engine: Any = None
        self.store = {} if store is None else store
        self.saved: list[BlockKey] = []
        self.loaded: list[BlockKey] = []
        self.finished: list[tuple[KVRequest, Sequence[BlockKey]]] = []
        self.discarded: list[BlockKey] = []
        self.params: dict[str, Any] | None = None
        self.is_stuck = False
        self.has_answer = True
        self._dice = dice
        self._open: list[tuple[HostBlock, bool, object]] = []
        self._reported: set[BlockKey] = set()

    def _host(self, block: HostBlock) -> tuple[dict, dict]:
        runner = self.engine.runner
        return (runner.host_states, runner.taken_host_states) if block.is_state else (runner.host, runner.taken_host)

    def lookup(self, request: KVRequest, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        if not self.has_answer or (self._dice is not None and self._dice.random() < 0.2):
            return None
        return [key in self.store for key in keys]

    def start_load(self, request: KVRequest, blocks: Sequence[HostBlock]) -> None:
        for block in blocks:
            self._check_plans(block, fills=True)
            _, taken = self._host(block)
            assert block.index not in taken
            taken[block.index] = True
            self._open.append((block, True, None))

    def start_save(self, blocks: Sequence[HostBlock]) -> None:
        for block in blocks:
            self._check_plans(block, fills=False)
            contents, taken = self._host(block)
            assert not taken.get(block.index), "a connector reads a host block that is being filled"
            taken[block.index] = False
            self._open.append((block, False, contents[block.index]))

    def _check_plans(self, block: HostBlock, *, fills: bool) -> None:
        for plan, _ in self.engine.in_flight:
            saved = plan.saved_host_states if block.is_state else plan.saved_host_blocks
            loaded = plan.loaded_host_states if block.is_state else plan.loaded_host_blocks
            assert block.index not in saved, "a plan in flight writes the host block"
            assert not fills or block.index not in loaded, "a plan in flight reads the host block"

    def poll(self) -> list[TransferResult]:
        results, still_open = [], []
        for block, is_load, before in self._open:
            if self.is_stuck or (self._dice is not None and self._dice.random() < 0.5):
                still_open.append((block, is_load, before))
                continue
            results.append(TransferResult(block, is_load, self._end(block, is_load, before)))
        self._open = still_open
        return results

    def _end(self, block: HostBlock, is_load: bool, before: object) -> bool:
        contents, taken = self._host(block)
        taken.pop(block.index, None)
        fails = self._dice is not None and self._dice.random() < 0.1
        if is_load:
            if fails or block.key not in self.store:
                contents[block.index] = [f"garbage of {block.key!r}"] * self.engine.runner.block_size
                return False
            contents[block.index] = self.store[block.key]
            self.loaded.append(block.key)
            return True
        assert contents[block.index] == before, "a host block was written while a connector read it"
        if not fails:
            if self._dice is not None and self.store and self._dice.random() < 0.1:
                del self.store[self._dice.choice(list(self.store))]
            self.store[block.key] = before
            self.saved.append(block.key)
        return not fails

    def wait(self, timeout: float) -> None:
        pass

    def take_changes(self, *, everything: bool = False) -> Sequence[StoreChange]:
        before, self._reported = set() if everything else self._reported, set(self.store)
        stored = [key for key in self.store if key not in before]
        removed = sorted(before - self._reported)
        return [StoreChange(removed, False), StoreChange(stored, True)]

    def request_finished(self, request: KVRequest, keys: Sequence[BlockKey]) -> dict[str, Any] | None:
        self.finished.append((request, keys))
        return self.params

    def discard(self, keys: Sequence[BlockKey]) -> None:
        self.discarded += keys
        for key in keys:
            self.store.pop(key, None)
