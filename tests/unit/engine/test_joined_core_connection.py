"""Client of an engine core that another process started."""

from __future__ import annotations

import os
import time
from typing import Any

from mvllm.engine.process.async_mp_client import AsyncMPClient
from mvllm.engine.process.joined_core_connection import JoinedCoreConnection
from mvllm.engine.process.zmq_channel import new_address
from mvllm.executor.process.activity_table import IDLE, ActivityTable


def test_the_heartbeat_age_of_an_idle_front_end_includes_the_running_step():
    """Any front end may answer a health check."""
    activity = ActivityTable.create(1)
    address = new_address()
    link = JoinedCoreConnection(address, os.dup(activity.fd), 60.0, lambda: None)
    config: Any = None
    client = AsyncMPClient(config, link, "")
    try:
        activity.write(0, IDLE)
        assert client.heartbeat_age == 0.0
        activity.write(0, "execution", step=3)
        time.sleep(0.01)
        assert 0.01 <= client.heartbeat_age < 60.0
        activity.write(0, "wake_up")  # may take as long as loading the weights
        time.sleep(0.001)
        assert client.heartbeat_age == 0.0
    finally:
        client.shutdown()
        activity.close()
    assert client.heartbeat_age == 0.0
