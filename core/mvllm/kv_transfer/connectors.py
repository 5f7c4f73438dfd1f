"""All KV connectors of one engine core, called as one.

A connector that raises is a bug of its package, and must not end the engine: the error is logged once, and what was
asked of it counts as not found or failed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mvllm.kv_transfer.connector import BlockKey, HostBlock, KVConnector, KVRequest, StoreChange, TransferResult
from mvllm.logging import get_logger
from mvllm.messages.requests import KVTierStats

logger = get_logger(__name__)

PRODUCER, CONSUMER, BOTH = "producer", "consumer", "both"
ROLES = (PRODUCER, CONSUMER, BOTH)
"""What an engine does with a connector: it saves blocks, loads blocks, or both."""


class KVConnectors:
    """The connectors, in the order in which a block that several have is looked for.

    Args:
        connectors: By name, with the role of the engine in each.
    """

    def __init__(self, connectors: Mapping[str, tuple[KVConnector, str]]) -> None:
        self._connectors = {name: connector for name, (connector, _) in connectors.items()}
        self._loading = [name for name, (_, role) in connectors.items() if role != PRODUCER]
        self._saving = [name for name, (_, role) in connectors.items() if role != CONSUMER]
        self._has_failed: set[str] = set()
        self._num_loaded: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()
        self._num_saved: Counter[str] = Counter()
        self._open_loads: dict[str, set[HostBlock]] = {name: set() for name in self._connectors}
        self._open_saves: dict[str, set[HostBlock]] = {name: set() for name in self._connectors}

    @property
    def names(self) -> list[str]:
        """The names of the connectors."""
        return list(self._connectors)

    @property
    def can_load(self) -> bool:
        """Whether any connector is asked for blocks."""
        return bool(self._loading)

    @property
    def can_save(self) -> bool:
        """Whether any connector stores blocks."""
        return bool(self._saving)

    def lookup(self, request: KVRequest, keys: Sequence[BlockKey]) -> dict[BlockKey, str] | None:
        """The connector that has each key; without those that none has. None if a connector does not know yet."""
        found: dict[BlockKey, str] = {}
        is_open = False
        for name in self._loading:
            answer = self._call(name, "lookup", [False] * len(keys), request, keys)
            if answer is None:
                is_open = True
                continue
            for key, has_it in zip(keys, answer):
                if has_it:
                    found.setdefault(key, name)
        return None if is_open else found

    def start_load(self, request: KVRequest, blocks: Mapping[str, Sequence[HostBlock]]) -> None:
        """Begins to fill host blocks, each by the connector that has its key. `poll` reports the end of each."""
        for name, of_connector in blocks.items():
            self._open_loads[name].update(of_connector)
            self._call(name, "start_load", None, request, of_connector)

    def start_save(self, blocks: Sequence[HostBlock], names: Sequence[str] | None = None) -> list[HostBlock]:
        """Begins to store host blocks.

        Args:
            names: Connectors to store them; None for all that do.

        Returns:
            One entry for each block and connector: as many ends `poll` reports.
        """
        started = []
        for name in self._saving if names is None else [name for name in names if name in self._saving]:
            new = [block for block in blocks if block not in self._open_saves[name]]
            if new:
                self._open_saves[name].update(new)
                started += new
                self._call(name, "start_save", None, new)
        return started

    def poll(self) -> list[TransferResult]:
        """The transfers that have ended since the last call."""
        ended: list[TransferResult] = []
        for name in self._connectors:
            results: list[TransferResult] = self._call(name, "poll", [])
            for result in results:
                still_open = (self._open_loads if result.is_load else self._open_saves)[name]
                if result.block not in still_open:
                    self._log_once(name, "poll", f"reports the end of a transfer that is not open: {result}")
                    continue
                still_open.remove(result.block)
                if not result.is_load:
                    self._num_saved[name] += result.ok
                elif result.ok:
                    self._num_loaded[name] += 1
                else:
                    self._num_failed[name] += 1
                ended.append(result)
        return ended

    def wait(self, timeout: float) -> None:
        """Waits until a transfer has ended, or an open lookup has an answer; at most about `timeout` seconds."""
        started = time.monotonic()
        for name in self._loading or self._connectors:
            self._call(name, "wait", None, timeout / max(1, len(self._loading)))
            if time.monotonic() - started >= timeout:
                return

    def request_finished(self, request: KVRequest, keys: Sequence[BlockKey]) -> tuple[dict[str, Any], list[str]]:
        """A request has ended.

        Returns:
            The `kv_transfer_params` of all connectors, and the connectors that returned some.
        """
        params: dict[str, Any] = {}
        named: list[str] = []
        for name in self._connectors:
            found = self._call(name, "request_finished", None, request, keys)
            if found is not None:
                params.update(found)
                named.append(name)
        return params, named

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Lets all connectors forget contents that may be wrong."""
        for name in self._connectors:
            self._call(name, "discard", None, keys)

    @property
    def reports_changes(self) -> bool:
        """Whether any connector reports what its store has."""
        return any(connector.medium is not None for connector in self._connectors.values())

    def take_changes(self, *, everything: bool = False) -> list[tuple[str, StoreChange]]:
        """How the stores have changed, each change with the name of its medium; see KVConnector.take_changes."""
        changes: list[tuple[str, StoreChange]] = []
        for name, connector in self._connectors.items():
            if connector.medium is not None:
                own: Sequence[StoreChange] = self._call(name, "take_changes", (), everything=everything)
                changes += [(connector.medium, change) for change in own]
        return changes

    def stats(self) -> dict[str, KVTierStats]:
        """Sizes and counters by connector."""
        found = {}
        for name in self._connectors:
            own: Mapping[str, float] = self._call(name, "stats", {})
            found[name] = KVTierStats(
                bytes_used=int(own.get("bytes_used", 0)),
                bytes_limit=int(own.get("bytes_limit", 0)),
                num_loaded=self._num_loaded[name],
                num_saved=self._num_saved[name],
                num_load_failures=self._num_failed[name],
            )
        return found

    def close(self) -> None:
        """Ends all transfers and threads. Idempotent."""
        for name in self._connectors:
            self._call(name, "close", None)

    def _call(self, name: str, method: str, default: Any, *args: Any, **keywords: Any) -> Any:
        """Calls a connector; `default` if it raises."""
        try:
            call: Callable[..., Any] = getattr(self._connectors[name], method)
            return call(*args, **keywords)
        except Exception as e:  # noqa: BLE001  (a package's code, of which any error is possible)
            self._log_once(name, method, f"failed: {type(e).__name__}: {e}", e)
            return default

    def _log_once(self, name: str, method: str, what: str, error: Exception | None = None) -> None:
        if name not in self._has_failed:
            self._has_failed.add(name)
            logger.error("The KV connector %r: its %s %s", name, method, what, exc_info=error)
