"""The setting kv_events_config, and the errors for invalid values."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.kv_events import KVEventsConfig, endpoint_of_rank, read_kv_events_config
from mvllm.errors import ConfigError


def test_the_fields_of_vllm_are_read() -> None:
    config = read_kv_events_config(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:7000",
            "replay_endpoint": None,
            "buffer_steps": 5,
            "hwm": 0,
            "max_queue_size": 100,
            "topic": "kv",
        }
    )
    assert config == KVEventsConfig(True, "zmq", "tcp://*:7000", "", 5, 0, "kv") and config.publishes
    assert not read_kv_events_config({}).publishes
    assert not read_kv_events_config({"enable_kv_cache_events": True, "publisher": "null"}).publishes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"endpont": "x"}, "permits the keys enable_kv_cache_events, publisher"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be true or false, found 'yes'"),
        ({"buffer_steps": True}, "buffer_steps must be a number, found True"),
        ({"buffer_steps": 0}, "buffer_steps must be from 1 to 10,000,000, not 0"),
        ({"publisher": "kafka"}, "publisher must be zmq or null, not 'kafka'"),
        ({"endpoint": "localhost:5557"}, "endpoint must begin with tcp:// or ipc://"),
        ({"endpoint": ""}, "endpoint must begin with tcp:// or ipc://"),
        ({"replay_endpoint": "tcp://host"}, "needs a port from 1 to 65535"),
    ],
)
def test_other_values_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_kv_events_config(settings)
    assert said in str(error.value)


def test_each_replica_has_its_own_address() -> None:
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("ipc:///tmp/events", 0) == "ipc:///tmp/events"
    assert endpoint_of_rank("ipc:///tmp/events", 2) == "ipc:///tmp/events_dp2"
    with pytest.raises(ConfigError, match="with 36 added"):
        endpoint_of_rank("tcp://*:65500", 36)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"distributed_executor_backend": "external_launcher"}, "each rank runs the whole engine"),
    ],
)
def test_settings_that_contradict_it_are_refused(other: dict[str, Any], said: str) -> None:
    args = EngineArgs(model="demo", kv_events_config={"enable_kv_cache_events": True}, **other)
    with pytest.raises(ConfigError, match=said):
        args.validate()
