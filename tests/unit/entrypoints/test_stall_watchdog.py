"""The report on requests that get no answer although nothing computes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.streaming_response import EventStreamResponse
from mvllm.entrypoints.openai.server.body_routes import AdmittedRequest
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.stall_watchdog import StallWatchdog

LATE = 0.05


class FakeEngine:
    is_idle = True

    def describe_cores(self) -> list[str]:
        return ["Engine core 7 (idle):\nits stacks"]


class FakeHandler:
    num_tokens = 0

    def close(self) -> None:
        pass


@contextmanager
def watching(engine: Any, **settings: float) -> Iterator[StallWatchdog]:
    watchdog = StallWatchdog(asyncio.get_running_loop(), engine, **({"seconds": LATE} | settings))
    try:
        yield watchdog
    finally:
        watchdog.close()
        watchdog._thread.join(120)
        assert not watchdog._thread.is_alive()


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if "fault of the server" in record.getMessage()]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def wait_for_lost_output() -> None:
    await asyncio.get_running_loop().create_future()


async def until(is_true: Callable[[], object]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_a_request_that_nobody_works_on_is_reported_once(reports: Callable[[], list[str]]) -> None:
    async def test() -> None:
        waiting = asyncio.create_task(wait_for_lost_output(), name="the request's task")
        with watching(FakeEngine()) as watchdog:
            watchdog.begin("POST /v1/completions")
            await until(reports)
            watchdog.begin("POST /v1/embeddings")
            await asyncio.sleep(4 * LATE)
        waiting.cancel()

    run(test())
    [report] = reports()
    assert "POST /v1/completions" in report and "its stacks" in report
    assert "the request's task" in report and "in wait_for_lost_output" in report
    assert "Thread MainThread" in report


def test_requests_in_work_are_not_reported(reports: Callable[[], list[str]]) -> None:
    async def test() -> None:
        engine = FakeEngine()
        with watching(engine, seconds=0.5) as watchdog:
            for _ in range(3):
                watchdog.end(watchdog.begin("ended in time"))
            watchdog.begin("of a client that does not read", lambda: True)
            await asyncio.sleep(0.8)
            engine.is_idle = False
            watchdog.begin("in a busy engine")
            await asyncio.sleep(0.8)

    run(test())
    assert not reports()


def test_a_blocked_event_loop_is_reported(reports: Callable[[], list[str]]) -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.is_idle = False  # does not matter
        with watching(engine, loop_seconds=0.05) as watchdog:
            watchdog.begin("POST /v1/completions")
            deadline = time.monotonic() + 120
            while not reports() and time.monotonic() < deadline:
                time.sleep(0.01)

    run(test())
    [report] = reports()
    assert report.startswith("The event loop has run no callback")
    assert "time.sleep(0.01)" in report


def test_the_thread_sleeps_while_there_are_no_requests() -> None:
    async def test() -> None:
        with watching(FakeEngine()) as watchdog:
            await until(lambda: watchdog._sleeps)
            for _ in range(2):
                request = watchdog.begin("one")
                await until(lambda: not watchdog._sleeps)
                watchdog.end(request)
                await until(lambda: watchdog._sleeps)

    run(test())


def test_admitted_requests_are_watched_until_their_end() -> None:
    async def events() -> Any:
        yield b"data: 1\n\n"

    async def test() -> None:
        state = ServerState(heartbeat_timeout=1.0)
        with watching(FakeEngine(), seconds=60.0) as watchdog:
            state.watchdog = watchdog
            handler: Any = FakeHandler()
            admitted = AdmittedRequest(state, handler, None, "POST /v1/completions", in_background=False)
            [request] = watchdog._requests
            response = EventStreamResponse(events(), 10.0)
            admitted.set_response(response)
            assert request.name == "POST /v1/completions" and not request.waits_for_client()
            response._waiting_since = 1.0
            assert request.waits_for_client()
            admitted.end()
            assert not watchdog._requests

    run(test())
