"""The time after which a core that sends no updates is considered hung."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from mvllm.engine.process.async_mp_client import AsyncMPClient
from mvllm.executor.process.activity_table import Activity


class Loop:
    """Records the calls to the event loop."""

    def __init__(self) -> None:
        self.later: list[float] = []
        self.ordered: list[Any] = []

    def call_later(self, seconds: float, callback: Any) -> None:
        self.later.append(seconds)

    def run_in_executor(self, executor: None, work: Any) -> None:
        self.ordered.append(work)


def check_heartbeat(activity: str, seconds: float) -> Loop:
    """The client's result at its next heartbeat check, after the core has had this activity for `seconds`."""
    loop = Loop()
    link = SimpleNamespace(
        channel=SimpleNamespace(num_sent=1),
        unresponsive_timeout=315.0,
        activity=Activity(activity, None, 0, seconds),
        kill_unresponsive=lambda: None,
    )
    config = SimpleNamespace(parallel=SimpleNamespace(start_timeout=1800.0))
    client: Any = AsyncMPClient(config, link, "a platform")  # type: ignore[arg-type]
    client._loop, client._last_update_at = loop, time.monotonic() - seconds
    client._check_heartbeat()
    return loop


def test_wake_up_has_the_time_limit_of_a_start() -> None:
    loop = check_heartbeat("wake_up", 400.0)  # weights are read from a slow disk
    assert not loop.ordered and loop.later == [315.0]  # later steps have the usual limit
    assert check_heartbeat("wake_up", 1900.0).ordered


def test_a_step_has_a_shorter_time_limit_than_a_start() -> None:
    assert check_heartbeat("execution", 400.0).ordered
    loop = check_heartbeat("execution", 300.0)
    assert not loop.ordered and 0 < loop.later[0] <= 15.0
