"""KVTransferConfig: where keys and values are kept beside the device, and the parsing of its settings.

The setting `kv_transfer_config` is a JSON object, with the keys that vLLM has for it:

    {"kv_connector": "tcp", "kv_role": "producer", "kv_connector_extra_config": {"port": 7000}}
    {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{...}, {...}]}}

`kv_role` is short for the connector `shared_memory` in that role, `kv_disk_cache` for the connector `disk` in the role
`both`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mvllm.errors import ConfigError

DISK = "disk"
SHARED_MEMORY = "shared_memory"
MULTI_CONNECTOR = "MultiConnector"
ROLES = ("producer", "consumer", "both")
PREEMPTION_MODES = ("auto", "recompute", "swap")

_ROLES = {
    **{name: name for name in ROLES},
    **{f"kv_{name}": name for name in ROLES},
}
_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config")
_GIB = 2**30


@dataclass(frozen=True)
class KVConnectorConfig:
    """One connector.

    Attributes:
        name: Of an installed package's entry point.
        role: `producer` saves blocks, `consumer` loads them, `both` does both.
        options: The connector's own settings.
    """

    name: str
    role: str = "both"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KVTransferConfig:
    """Where keys and values are kept beside the device.

    Attributes:
        offloading_bytes: Host memory that keeps blocks; 0 for none. Connectors then have a small buffer in it.
        connectors: Stores outside of the engine, in the order in which they are searched.
        preemption_mode: `swap` keeps the blocks of preempted requests in host memory, `recompute` computes them again,
            `auto` does what takes less time. Without `offloading_bytes` they are computed again.
    """

    offloading_bytes: int = 0
    connectors: tuple[KVConnectorConfig, ...] = ()
    preemption_mode: str = "auto"

    @property
    def is_used(self) -> bool:
        """Whether anything is kept beside the device."""
        return bool(self.offloading_bytes or self.connectors)


def read_kv_transfer_config(
    *,
    offloading_size: float | None,
    disk_cache: str | None,
    disk_cache_size: float | None,
    preemption_mode: str,
    settings: Mapping[str, Any] | None,
    role: str | None = None,
) -> KVTransferConfig:
    """The configuration that the settings of EngineArgs describe.

    Raises:
        ConfigError: A setting contradicts another one, or `settings` has a key or a value that is not permitted.
    """
    if disk_cache_size is not None and disk_cache is None:
        raise ConfigError(
            f"kv_disk_cache_size is {disk_cache_size:g}, but kv_disk_cache names no folder. Set it, or leave out the "
            "size."
        )
    if preemption_mode == "swap" and not offloading_size:
        raise ConfigError(
            "preemption_mode is 'swap', which keeps keys and values in host memory, but kv_offloading_size gives it "
            "none. Set kv_offloading_size, or leave out preemption_mode."
        )
    if role is not None:
        if settings is not None:
            raise ConfigError(
                f"kv_role is {role!r}, which is short for a kv_transfer_config of its own. Leave it out, and give the "
                "role in kv_transfer_config."
            )
        settings = {"kv_connector": SHARED_MEMORY, "kv_role": role}
    connectors = list(_read_connectors(settings)) if settings is not None else []
    if disk_cache is not None:
        options: dict[str, Any] = {"path": os.path.abspath(os.path.expanduser(disk_cache))}
        if disk_cache_size is not None:
            options["size"] = int(disk_cache_size * _GIB)
        connectors.insert(0, KVConnectorConfig(DISK, "both", options))
    names = [connector.name for connector in connectors]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"The KV connector {min(doubled)!r} is named twice. Name each one once.")
    return KVTransferConfig(int((offloading_size or 0) * _GIB), tuple(connectors), preemption_mode)


def _read_connectors(settings: Mapping[str, Any]) -> Iterator[KVConnectorConfig]:
    """The connectors in a `kv_transfer_config`."""
    unknown = [key for key in settings if key not in _KEYS]
    name, role = settings.get("kv_connector"), settings.get("kv_role", "both")
    options = settings.get("kv_connector_extra_config") or {}
    if unknown or not isinstance(name, str) or not name or not isinstance(options, Mapping):
        raise ConfigError(
            f"kv_transfer_config takes the keys {', '.join(_KEYS)}: the name of a connector, a role and an object with "
            f"its settings. Found {dict(settings)!r}."
        )
    if name == MULTI_CONNECTOR:
        several = options.get("connectors")
        if not isinstance(several, list | tuple) or not all(isinstance(each, Mapping) for each in several):
            raise ConfigError(
                f"The connector {MULTI_CONNECTOR} takes 'connectors' in kv_connector_extra_config: a list of objects "
                f"like kv_transfer_config itself. Found {options!r}."
            )
        for each in several:
            yield from _read_connectors(each)
        return
    if not isinstance(role, str) or role not in _ROLES:
        raise ConfigError(f"kv_role must be 'producer', 'consumer' or 'both', not {role!r}.")
    yield KVConnectorConfig(name, _ROLES[role], dict(options))
