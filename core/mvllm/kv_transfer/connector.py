"""The interface of KV connectors, which store blocks of keys and values outside of an engine and find them again.

Blocks reach a connector through host memory. Workers copy blocks between the device and *host blocks* as part of a
step, as the plan says; a connector copies between host blocks and its own store on threads of its own, and never sees
the device:

    device blocks  <── step, by the workers ──>  host blocks  <── connector, asynchronous ──>  disk, another engine, ...

A block is named by its key: the hash of all tokens up to its end, followed by the number of its KV cache group in two
bytes, little-endian, unless that is 0. A sequence state has the hash of its tokens and two bytes 0xff, and its own host
blocks. Equal keys in engines of one `namespace` name equal contents.

Plugins add connectors through the entry points `mvllm.kv_connectors`. An engine core calls a connector from one thread;
no method waits except `wait` and `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mvllm.kv_transfer.host_kv_cache import HostKVCache

BlockKey = bytes
"""Name of the contents of a block in one KV cache group, or of a sequence state."""


@dataclass(frozen=True)
class KVConnectorContext:
    """What a connector knows of its engine.

    Attributes:
        namespace: 32 bytes, equal in engines whose blocks of equal keys have equal bytes: same weights, dtypes, block
            size, layouts of the KV cache, numbers of ranks, and version of the format.
        engine_id: Names this engine; unique among running engines.
        role: `producer`, `consumer` or `both`.
        blocks: The host blocks, of all ranks together.
        states: The host blocks of sequence states; None in models without them.
        options: The connector's own settings.
        namespace_parts: What the namespace is a hash of, by name, for messages.
    """

    namespace: bytes
    engine_id: str
    role: str
    blocks: HostKVCache
    states: HostKVCache | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    namespace_parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostBlock:
    """One host block and the key of its contents.

    Attributes:
        key: The key.
        index: Index among the host blocks of its kind.
        is_state: It is one of `KVConnectorContext.states`.
    """

    key: BlockKey
    index: int
    is_state: bool = False


@dataclass(frozen=True)
class TransferResult:
    """The end of one transfer of `start_load` or `start_save`.

    Attributes:
        block: The host block. The connector does not use it any more.
        is_load: It was a load.
        ok: A load has filled the block with the contents of its key. Of a failed load the contents are unspecified, and
            the tokens are computed. A failed save loses nothing.
    """

    block: HostBlock
    is_load: bool
    ok: bool


@dataclass(frozen=True)
class StoreChange:
    """What a connector's store has, or has no longer.

    Attributes:
        keys: The keys.
        is_stored: Whether it has them from now on.
    """

    keys: Sequence[BlockKey]
    is_stored: bool


@dataclass(frozen=True)
class KVRequest:
    """A request, as a connector sees it.

    Attributes:
        request_id: Its id in this engine.
        kv_transfer_params: What the client sent under this name: an object of JSON. Not checked: connectors treat it as
            untrusted input.
    """

    request_id: str
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)


class KVConnector(ABC):
    """A store of blocks outside of the engine.

    Attributes:
        medium: What KV cache events call this store; None if it reports no changes.
    """

    medium: str | None = None

    def __init__(self, context: KVConnectorContext) -> None:
        """Opens the store.

        Raises:
            ConfigError: The options or the role are wrong, or the store cannot be used.
        """
        self.context = context

    @abstractmethod
    def lookup(self, request: KVRequest, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """Which of the keys the store has; None if that is not known yet, so that core asks again later.

        A connector answers other than None within a bounded time, also if a remote side is gone.

        Args:
            request: The waiting request whose blocks have these keys.
            keys: In the order of its tokens. Core needs the longest prefix.
        """

    @abstractmethod
    def start_load(self, request: KVRequest, blocks: Sequence[HostBlock]) -> None:
        """Begins to fill host blocks with the contents of their keys. `poll` reports the end of each."""

    @abstractmethod
    def start_save(self, blocks: Sequence[HostBlock]) -> None:
        """Begins to store the contents of host blocks. `poll` reports the end of each.

        Core calls it once the step that filled them has ended.
        """

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """The transfers that have ended since the last call."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Waits until `poll` has a result, or an open `lookup` an answer, at most `timeout` seconds."""

    def request_finished(self, request: KVRequest, keys: Sequence[BlockKey]) -> dict[str, Any] | None:
        """A request has ended or was aborted.

        Args:
            keys: The keys of all its full blocks, of all groups, in the order of its tokens.

        Returns:
            The `kv_transfer_params` of the response, by which another engine finds these blocks; None for none.
        """
        return None

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forgets the contents of these keys, which may be wrong: a request that had them has failed."""

    def take_changes(self, *, everything: bool = False) -> Sequence[StoreChange]:
        """How the store has changed, in the order of the changes. Only called if it has a `medium`.

        A key that `poll` reports as saved is in the changes that are taken then, unless it was removed again.

        Args:
            everything: Return all keys that are stored now. Core begins with this call; before it nothing needs to be
                recorded. Otherwise, what has changed since the last call.
        """
        return ()

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters by name, such as `bytes_used`, `bytes_limit`, `loaded_blocks`, `saved_blocks`."""
        return {}

    def close(self) -> None:
        """Ends all transfers and threads. Idempotent; what is stored durably stays."""
