"""Host blocks and connectors without an engine: what a core does with them, in this process and in others."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from mvllm.extension_api.kv_transfer import (
    HostBlock,
    HostKVCache,
    KVConnector,
    KVConnectorContext,
    KVRequest,
    TransferResult,
)
from mvllm_kv_transfer.remote.nixl import NixlConnector
from mvllm_kv_transfer.remote.shared_memory import SharedMemoryConnector
from mvllm_kv_transfer.remote.tcp import KEY_VARIABLE, TCPConnector

CONNECTORS: dict[str, type[KVConnector]] = {
    "tcp": TCPConnector,
    "shared_memory": SharedMemoryConnector,
    "nixl": NixlConnector,
}
BLOCK_BYTES, STATE_BYTES, NUM_BLOCKS, NUM_STATES = 3 << 19, 1000, 8, 4
NAMESPACE = b"n" * 32


def make_connector(
    name: str,
    role: str,
    *,
    engine_id: str = "",
    namespace: bytes = NAMESPACE,
    parts: dict[str, str] | None = None,
    rank_bytes: Sequence[int] = (BLOCK_BYTES - 5, 5),
    has_states: bool = True,
    **options: Any,
) -> KVConnector:
    """A connector; over TCP a consumer may connect to any port of this machine, unless `options` has other peers."""
    if name in ("tcp", "nixl") and role in ("consumer", "both"):
        options = {"peers": ["127.0.0.1"], **options}
    context = KVConnectorContext(
        namespace=namespace,
        engine_id=engine_id or f"{role}-{time.monotonic_ns()}",
        role=role,
        blocks=HostKVCache(NUM_BLOCKS, list(rank_bytes)),
        states=HostKVCache(NUM_STATES, [STATE_BYTES]) if has_states else None,
        options=options,
        namespace_parts=parts or {},
    )
    return CONNECTORS[name](context)


def host_block(number: int, index: int | None = None, *, is_state: bool = False) -> HostBlock:
    """The block with the key of `number`, by default at the index `number`."""
    return HostBlock(key_of(number, is_state=is_state), number if index is None else index, is_state)


def key_of(number: int, *, is_state: bool = False) -> bytes:
    return b"%s%030d" % (b"s" if is_state else b"b", number)


def fill(connector: KVConnector, block: HostBlock) -> HostBlock:
    """Writes the contents of the block's key."""
    view(connector, block)[:] = sum(block.key) % 251
    return block


def is_filled(connector: KVConnector, block: HostBlock) -> bool:
    """Whether a host block has the contents of its key, in every byte."""
    return bool((view(connector, block) == sum(block.key) % 251).all())


def view(connector: KVConnector, block: HostBlock) -> Any:
    cache = connector.context.states if block.is_state else connector.context.blocks
    assert cache is not None
    return cache.block(block.index)


def finish_request(producer: KVConnector, blocks: Sequence[HostBlock], request_id: str = "r") -> dict[str, Any]:
    """A request ends whose blocks are in host memory. Returns the params for the consumer."""
    request = KVRequest(request_id, {"do_remote_decode": True})
    params = producer.request_finished(request, [block.key for block in blocks])
    assert params is not None
    producer.start_save([fill(producer, block) for block in blocks])
    return params


def look_up(consumer: KVConnector, request: KVRequest, keys: Sequence[bytes], seconds: float = 120) -> list[bool]:
    """Asks as a core does until there is an answer."""
    deadline = time.monotonic() + seconds
    while (answer := consumer.lookup(request, keys)) is None:
        assert time.monotonic() < deadline, "no answer"
        consumer.wait(0.5)
        consumer.poll()
    return list(answer)


def load(consumer: KVConnector, request: KVRequest, blocks: Sequence[HostBlock]) -> dict[bytes, bool]:
    """Loads blocks. Returns by key whether it succeeded."""
    consumer.start_load(request, blocks)
    return {result.block.key: result.ok for result in poll(consumer, len(blocks))}


def poll(connector: KVConnector, count: int, seconds: float = 120) -> list[TransferResult]:
    """The next `count` results."""
    results: list[TransferResult] = []
    deadline = time.monotonic() + seconds
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count} results: {results}"
        connector.wait(0.5)
        results += connector.poll()
    assert len(results) == count, results
    return results


def run_producer(
    pipe: Connection, key: str, name: str, num_blocks: int, num_states: int, options: dict[str, Any]
) -> None:
    """A producer in a process of its own, with blocks 0, 1, ... of a request. Ends with the pipe."""
    os.environ[KEY_VARIABLE] = key  # the fork server has the environment of its first user, maybe of another test
    connector = make_connector(name, "producer", **options)
    blocks = [host_block(number) for number in range(num_blocks)]
    blocks += [host_block(number, is_state=True) for number in range(num_states)]
    pipe.send(finish_request(connector, blocks))
    while True:
        try:
            pipe.recv()
        except EOFError:
            connector.close()
            return


class ProducerProcess:
    """`run_producer` in another process. Close it or kill it."""

    def __init__(self, name: str, num_blocks: int = 6, num_states: int = 2, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, end = context.Pipe()
        self.process = context.Process(
            target=run_producer,
            args=(end, os.environ[KEY_VARIABLE], name, num_blocks, num_states, options),
            daemon=True,
        )
        self.process.start()
        end.close()
        assert self.pipe.poll(120), "the producer has not started"
        self.params: dict[str, Any] = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(120)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(120)
