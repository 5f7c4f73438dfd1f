"""Creates the KV connectors that the configuration names: core's own, and those of installed packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mvllm import plugin_groups
from mvllm.config.kv_transfer import KVConnectorConfig
from mvllm.errors import ConfigError, MvllmError
from mvllm.kv_transfer.connector import KVConnector, KVConnectorContext
from mvllm.kv_transfer.connectors import KVConnectors

BUILT_IN = {
    "disk": "mvllm.kv_transfer.disk_connector:DiskConnector",
    "tcp": "mvllm.kv_transfer.remote.tcp:TCPConnector",
    "shared_memory": "mvllm.kv_transfer.remote.shared_memory:SharedMemoryConnector",
    "nixl": "mvllm.kv_transfer.remote.nixl:NixlConnector",
}
"""Core's connectors, by name."""


def make_connectors(
    configs: tuple[KVConnectorConfig, ...], make_context: Callable[[KVConnectorConfig], KVConnectorContext]
) -> KVConnectors:
    """Creates all connectors.

    Raises:
        ConfigError: There is no connector of a name, its package cannot be loaded, or it rejects its settings. Those
            that were created are closed.
    """
    made: dict[str, tuple[KVConnector, str]] = {}
    try:
        for config in configs:
            made[config.name] = _make(config, make_context(config)), config.role
    except BaseException:
        KVConnectors(made).close()
        raise
    return KVConnectors(made)


def _make(config: KVConnectorConfig, context: KVConnectorContext) -> KVConnector:
    if config.name in BUILT_IN:
        module, _, name = BUILT_IN[config.name].partition(":")
        kind: Any = getattr(importlib.import_module(module), name)
        return kind(context)
    source = plugin_groups.find(plugin_groups.KV_CONNECTORS, config.name)
    if source is None:
        offered = plugin_groups.allowed_names(plugin_groups.KV_CONNECTORS)
        raise ConfigError(
            f"There is no KV connector {config.name!r}. There are: {', '.join([*BUILT_IN, *offered])}. Others are "
            f"installed as packages with an entry point of {plugin_groups.KV_CONNECTORS.group}."
        )
    kind = plugin_groups.load(plugin_groups.KV_CONNECTORS, source)
    if not (isinstance(kind, type) and issubclass(kind, KVConnector)):
        raise ConfigError(
            f"The KV connector {config.name!r} is {source.entry_point} of {source.distribution} {source.version}, "
            f"which is no class derived from KVConnector. Run: pip install -U {source.distribution}"
        )
    try:
        return kind(context)
    except MvllmError:
        raise
    except Exception as e:
        raise ConfigError(
            f"The KV connector {config.name!r} of {source.distribution} {source.version} cannot be opened: "
            f"{type(e).__name__}: {e}"
        ) from e
