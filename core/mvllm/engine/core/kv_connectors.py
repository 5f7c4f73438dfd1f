"""Creates the KV connectors that the configuration names, which installed packages provide."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mvllm import plugin_groups
from mvllm.config.kv_transfer import DISK, SHARED_MEMORY, KVConnectorConfig
from mvllm.errors import ConfigError, MvllmError
from mvllm.kv_transfer.connector import KVConnector, KVConnectorContext
from mvllm.kv_transfer.connectors import KVConnectors

_SETTINGS = {DISK: "kv_disk_cache or kv_transfer_config", SHARED_MEMORY: "kv_role or kv_transfer_config"}
"""Settings that ask for a connector, where it is not kv_transfer_config alone."""


def check_connectors(configs: Iterable[KVConnectorConfig]) -> None:
    """Finds the connectors without importing them, so that a missing package is known before a model is loaded.

    Raises:
        ConfigError: No installed package has a connector of that name, it is not allowed, or several have it.
    """
    for config in configs:
        try:
            plugin_groups.require(plugin_groups.KV_CONNECTORS, config.name)
        except ConfigError as e:
            setting = _SETTINGS.get(config.name, "kv_transfer_config")
            raise ConfigError(f"{setting} asks for the KV connector {config.name!r}. {e}") from e


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
    source = plugin_groups.require(plugin_groups.KV_CONNECTORS, config.name)
    kind = plugin_groups.load_class(plugin_groups.KV_CONNECTORS, source, KVConnector, "kv_transfer.KVConnector")
    try:
        return kind(context)
    except MvllmError:
        raise
    except Exception as e:
        raise ConfigError(
            f"The KV connector {config.name!r} of {source.distribution} {source.version} cannot be opened: "
            f"{type(e).__name__}: {e}"
        ) from e
