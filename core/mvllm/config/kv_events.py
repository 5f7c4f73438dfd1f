"""KVEventsConfig: whether and where an engine publishes the events of its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mvllm.errors import ConfigError

PUBLISHERS = ("zmq", "null")
_KIND_NAMES = {"bool": "true or false", "str": "a text", "int": "a number"}
_MOST_STEPS = 10_000_000


@dataclass(frozen=True)
class KVEventsConfig:
    """Publication of KV cache events. The names are vLLM's.

    Attributes:
        enable_kv_cache_events: Publish events.
        publisher: `zmq`, or `null` to publish nothing.
        endpoint: ZeroMQ address of the PUB socket. `*` as host binds it on all interfaces: whoever reaches it reads
            the token ids of all prompts.
        replay_endpoint: ZeroMQ address of the ROUTER socket for missed batches and snapshots; empty for none.
        buffer_steps: Batches kept for `replay_endpoint`.
        hwm: Batches that the PUB socket keeps for a slow subscriber before it drops some.
        topic: The topic of every batch.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events_config(settings: Mapping[str, Any]) -> KVEventsConfig:
    """Checks the settings of the JSON object `kv_events_config`.

    Raises:
        ConfigError: A setting is unknown or not permitted.
    """
    known = {field.name: field.type for field in fields(KVEventsConfig)}
    values = dict(settings)
    values.pop("max_queue_size", None)  # of another engine: our publisher has no queue besides the socket's
    for name, value in list(values.items()):
        if name not in known:
            raise ConfigError(f"kv_events_config permits the keys {', '.join(known)}, found {name!r:.40}.")
        if value is None:
            del values[name]  # the default
        elif type(value).__name__ != known[name]:
            raise ConfigError(f"kv_events_config: {name} must be {_KIND_NAMES[str(known[name])]}, found {value!r:.60}.")
    config = KVEventsConfig(**values)
    if config.publisher not in PUBLISHERS:
        raise ConfigError(
            f"kv_events_config: publisher must be {' or '.join(PUBLISHERS)}, not {config.publisher!r:.40}."
        )
    for name, least in (("buffer_steps", 1), ("hwm", 0)):
        if not least <= getattr(config, name) <= _MOST_STEPS:
            raise ConfigError(
                f"kv_events_config: {name} must be from {least} to {_MOST_STEPS:,}, not {getattr(config, name)}."
            )
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(config, name)
        if (name == "endpoint" or address) and not address.startswith(("tcp://", "ipc://", "inproc://")):
            raise ConfigError(
                f"kv_events_config: {name} must begin with tcp:// or ipc://, such as 'tcp://127.0.0.1:5557', found "
                f"{address!r:.60}."
            )
        endpoint_of_rank(address, 0)
    return config


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The address of one replica: its rank is added to a tcp port, or appended to another address.

    Raises:
        ConfigError: The port is no number, or too large.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or int(port) + rank > 65535:
        raise ConfigError(
            f"kv_events_config: the address {endpoint!r:.60} needs a port from 1 to 65535 at its end"
            + (f", also with {rank} added for the replica of that rank." if rank else ".")
        )
    return f"{host}:{int(port) + rank}"
