"""`kv_role` is short for the connector `shared_memory`."""

from __future__ import annotations

import pytest

from mvllm.config.kv_transfer import KVConnectorConfig, read_kv_transfer_config
from mvllm.errors import ConfigError

NOTHING = {"offloading_size": None, "disk_cache": None, "disk_cache_size": None, "preemption_mode": "auto"}


@pytest.mark.parametrize("role", ["producer", "consumer", "both"])
def test_it_names_the_connector(role):
    config = read_kv_transfer_config(**NOTHING, settings=None, role=role)
    assert config.connectors == (KVConnectorConfig("shared_memory", role),)


def test_it_contradicts_a_kv_transfer_config():
    settings = {"kv_connector": "tcp", "kv_role": "producer"}
    with pytest.raises(ConfigError, match="give the role in kv_transfer_config"):
        read_kv_transfer_config(**NOTHING, settings=settings, role="producer")
    config = read_kv_transfer_config(**NOTHING, settings=settings)
    assert config.connectors == (KVConnectorConfig("tcp", "producer"),)
