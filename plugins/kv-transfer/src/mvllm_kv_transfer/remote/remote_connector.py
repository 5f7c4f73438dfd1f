"""A connector that fetches blocks from the host memory of another engine; `Transport` is how.

A producer answers a request with `kv_transfer_params`, which name the request and the engine. A consumer gets them with
its own request, computes the keys of its prompt's blocks, asks the producer which of them are there, and fetches them.
Whatever fails, the consumer computes the tokens.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mvllm.extension_api import ConfigError, get_logger
from mvllm.extension_api.kv_transfer import (
    BlockKey,
    HostBlock,
    KVConnector,
    KVConnectorContext,
    KVRequest,
    TransferResult,
)
from mvllm_kv_transfer.remote.block_client import BlockClient
from mvllm_kv_transfer.remote.block_server import BlockServer, make_hello
from mvllm_kv_transfer.remote.channel import ChannelError
from mvllm_kv_transfer.remote.held_blocks import HeldBlocks
from mvllm_kv_transfer.remote.io_thread import IOThread
from mvllm_kv_transfer.remote.messages import MAX_FETCHED_BLOCKS, Hello, Welcome
from mvllm_kv_transfer.remote.options import RemoteOptions
from mvllm_kv_transfer.remote.transport import Address, Transport, host_bytes

logger = get_logger("mvllm.kv_transfer.remote")

_MAX_LOOKUP_KEYS = 1 << 17
_MAX_ID_LENGTH = 1024
_WARNING_SECONDS = 30.0
"""Between two warnings about one producer."""
_MAX_WARNED = 256
"""Producers that were warned about lately. Further ones are not, because requests name them."""


@dataclass(slots=True)
class _Lookup:
    """What a waiting request knows of its producer.

    Attributes:
        address: The producer's; None if the request names none that can be used.
        remote_id: The producer's id of the request.
        found: By key, whether the producer has it; None while it is being asked.
    """

    address: Address | None
    remote_id: str = ""
    found: dict[BlockKey, bool | None] = field(default_factory=dict)


class RemoteConnector(KVConnector):
    """Base of the connectors between engines.

    Args:
        context: See KVConnector.
        options: The checked options.
        transport: How engines are connected; closed by `close`.
    """

    def __init__(self, context: KVConnectorContext, options: RemoteOptions, transport: Transport) -> None:
        super().__init__(context)
        if context.role not in ("producer", "consumer", "both"):
            raise ConfigError(f"kv_role must be 'producer', 'consumer' or 'both', not {context.role!r}.")
        self._options = options
        self._transport = transport
        self._produces = context.role != "consumer"
        self._consumes = context.role != "producer"
        self._changed = threading.Condition()
        self._results: deque[TransferResult] = deque()
        self._has_answer = False
        self._lookups: dict[str, _Lookup] = {}
        self._num_lookups: dict[tuple[Address, str], int] = {}
        self._serial = itertools.count()
        self._warned: dict[Address, float] = {}
        self._num_loaded = self._num_failed = 0
        states = context.states
        fraction = options.max_held_fraction
        self._held = HeldBlocks(
            max(1, int(context.blocks.num_blocks * fraction)),
            0 if states is None else max(1, int(states.num_blocks * fraction)),
            options.hold_seconds,
            self._on_release,
            self._notify_server,
        )
        self._io = IOThread("kv-connector")
        hello = make_hello(
            context.namespace,
            context.blocks.block_bytes,
            0 if states is None else states.block_bytes,
            context.namespace_parts,
        )
        welcome = Welcome(context.blocks.num_blocks, 0 if states is None else states.num_blocks)
        self._server: BlockServer | None = None
        self._client = self._io.start(self._make_ends(hello, welcome)).result()

    async def _make_ends(self, hello: Hello, welcome: Welcome) -> BlockClient:
        if self._produces:
            self._server = BlockServer(self._transport, self._held, hello, welcome)
            self._serving = self._io.loop.create_task(self._server.run())
        return BlockClient(self._transport, hello)

    # --- the consumer

    def lookup(self, request: KVRequest, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """See KVConnector. Only requests with `do_remote_prefill` have blocks elsewhere."""
        if not self._consumes or request.kv_transfer_params.get("do_remote_prefill") is not True:
            return [False] * len(keys)
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            lookup = self._lookups[request.request_id] = self._begin_lookup(request)
        if lookup.address is None:
            return [False] * len(keys)
        new = [key for key in keys if key not in lookup.found]
        if new:
            lookup.found.update(dict.fromkeys(new))
            self._io.start(self._look_up(request.request_id, lookup, new))
        answers = [lookup.found[key] for key in keys]
        return None if None in answers else [bool(answer) for answer in answers]

    def start_load(self, request: KVRequest, blocks: Sequence[HostBlock]) -> None:
        """See KVConnector."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.address is None:
            self._report([TransferResult(block, is_load=True, ok=False) for block in blocks])
        else:
            self._io.start(self._fetch(request.request_id, lookup.address, lookup.remote_id, list(blocks)))

    def _begin_lookup(self, request: KVRequest) -> _Lookup:
        params = request.kv_transfer_params
        try:
            remote_id = params.get("remote_request_id")
            if not isinstance(remote_id, str) or not 0 < len(remote_id) <= _MAX_ID_LENGTH:
                raise ValueError("remote_request_id must be a text")
            address = self._transport.address_of(params)
        except ValueError as e:
            self._warn("", f"kv_transfer_params of request {request.request_id!a} are not used: {e}")
            return _Lookup(None)
        self._num_lookups[address, remote_id] = self._num_lookups.get((address, remote_id), 0) + 1
        return _Lookup(address, remote_id)

    async def _look_up(self, request_id: str, lookup: _Lookup, keys: list[BlockKey]) -> None:
        found = dict.fromkeys(keys, False)
        assert lookup.address is not None
        try:
            asked = keys[:_MAX_LOOKUP_KEYS]
            answer = await self._client.lookup(lookup.address, lookup.remote_id, asked, self._options.lookup_seconds)
            found.update(zip(asked, answer))
        except ChannelError as e:
            self._warn_of_peer(lookup.address, request_id, e)
        except Exception:
            logger.exception("A lookup of KV blocks failed; they are computed.")
        finally:
            lookup.found.update(found)
            with self._changed:
                self._has_answer = True
                self._changed.notify_all()

    async def _fetch(self, request_id: str, address: Address, remote_id: str, blocks: list[HostBlock]) -> None:
        deadline = time.monotonic() + self._options.transfer_seconds
        while blocks:
            part, blocks = blocks[:MAX_FETCHED_BLOCKS], blocks[MAX_FETCHED_BLOCKS:]
            filled = [False] * len(part)
            try:
                targets = [host_bytes(self.context, block) for block in part]
                seconds = max(0.0, deadline - time.monotonic())
                filled = await self._client.fetch(address, remote_id, part, targets, seconds)
            except ChannelError as e:
                self._warn_of_peer(address, request_id, e)
                part, blocks = part + blocks, []
                filled = [False] * len(part)
            except BaseException as e:
                if isinstance(e, Exception):
                    logger.exception("Fetching KV blocks failed; they are computed.")
                part, blocks = part + blocks, []
                filled = [False] * len(part)
                raise
            finally:
                self._num_loaded += sum(filled)
                self._num_failed += len(filled) - sum(filled)
                self._report([TransferResult(block, is_load=True, ok=ok) for block, ok in zip(part, filled)])

    # --- the producer

    def start_save(self, blocks: Sequence[HostBlock]) -> None:
        """See KVConnector. The save of a block ends when no other engine needs it any more."""
        self._report([TransferResult(b, is_load=False, ok=True) for b in blocks if not self._held.add(b)])

    def request_finished(self, request: KVRequest, keys: Sequence[BlockKey]) -> dict[str, Any] | None:
        """See KVConnector. Holds the blocks of a request that another engine continues."""
        self._end_lookup(request.request_id)
        wanted = request.kv_transfer_params.get("do_remote_decode", self.context.role == "producer")
        if not self._produces or wanted is not True or not keys:
            return None
        remote_id = f"{next(self._serial)}:{request.request_id}"[:_MAX_ID_LENGTH]
        self._held.expect(remote_id, keys)
        self.start_save(self._take_ended_saves(keys))
        self._notify_server()  # that there is a time limit
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.context.engine_id,
            "remote_request_id": remote_id,
            **self._transport.location(),
        }

    def _take_ended_saves(self, keys: Sequence[BlockKey]) -> list[HostBlock]:
        """Saves of these keys whose end core has not been told: they can go on."""
        wanted = set(keys)
        with self._changed:
            results = list(self._results)
            taken = [result for result in results if not result.is_load and result.block.key in wanted]
            if taken:
                self._results = deque(result for result in results if result not in taken)
        return [result.block for result in taken]

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """See KVConnector."""
        self._held.discard(keys)

    def _end_lookup(self, request_id: str) -> None:
        lookup = self._lookups.pop(request_id, None)
        if lookup is None or lookup.address is None:
            return
        name = (lookup.address, lookup.remote_id)
        self._num_lookups[name] -= 1
        if not self._num_lookups[name]:  # several sequences may come from one request of the producer
            del self._num_lookups[name]
            self._io.start(self._client.release(*name, self._options.lookup_seconds))

    def _on_release(self, block: HostBlock) -> None:
        self._report([TransferResult(block, is_load=False, ok=True)])

    def _notify_server(self) -> None:
        server = self._server
        if server is not None and not self._io.loop.is_closed():
            self._io.loop.call_soon_threadsafe(server.changed.set)

    # --- both

    def poll(self) -> list[TransferResult]:
        """See KVConnector."""
        with self._changed:
            results = list(self._results)
            self._results.clear()
            self._has_answer = False
            return results

    def wait(self, timeout: float) -> None:
        """See KVConnector."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._has_answer, timeout)

    def stats(self) -> Mapping[str, float]:
        """See KVConnector."""
        return {
            "held_blocks": self._held.num_held,
            "sent_blocks": 0 if self._server is None else self._server.num_sent,
            "loaded_blocks": self._num_loaded,
            "failed_blocks": self._num_failed,
        }

    def close(self) -> None:
        """See KVConnector."""
        self._held.release_all()
        self._io.close()
        self._client.close()
        self._transport.close()

    def _report(self, results: list[TransferResult]) -> None:
        if results:
            with self._changed:
                self._results.extend(results)
                self._changed.notify_all()

    def _warn_of_peer(self, address: Address, request_id: str, error: ChannelError) -> None:
        self._warn(address, f"Request {request_id!a} is computed: the engine at {address} {error}")

    def _warn(self, address: Address, message: str) -> None:
        now = time.monotonic()
        if len(self._warned) >= _MAX_WARNED:
            self._warned = {each: until for each, until in list(self._warned.items()) if now < until}
        is_warning = now >= self._warned.get(address, 0.0) and (address == "" or len(self._warned) < _MAX_WARNED)
        level = logging.WARNING if is_warning else logging.DEBUG
        if is_warning:
            self._warned[address] = now + _WARNING_SECONDS
        logger.log(level, "%s.", message)
