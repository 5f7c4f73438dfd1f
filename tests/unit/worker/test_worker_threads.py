"""A worker in the caller's process, called in several threads, one at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker import Worker
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime
from tests.unit.worker.fake_platform import FakePlatform


class RecordingRuntime(HostRuntime):
    """Notes the threads in which it is bound."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: list[int] = []

    def bind_thread(self) -> None:
        self.bound.append(threading.get_ident())


def test_the_device_is_bound_in_each_thread_that_calls_the_worker() -> None:
    worker = Worker(make_config(), FakePlatform(), WorkerContext())
    worker._runtime = runtime = RecordingRuntime()
    worker.check_health()
    assert not runtime.bound  # the thread that has bound the device
    with ThreadPoolExecutor(1) as thread:
        thread.submit(worker.check_health).result()
        thread.submit(worker.check_health).result()
        assert len(runtime.bound) == 1 and threading.get_ident() not in runtime.bound
    worker.check_health()
    worker.check_health()
    assert runtime.bound[1:] == [threading.get_ident()]
