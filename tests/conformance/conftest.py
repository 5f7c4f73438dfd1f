"""Contract checks: `pytest tests/conformance --platform NAME`; without a name, the platform that is available."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mvllm.platform.choose import choose_platform
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.topology import WorkerContext


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", help="name of the platform whose conformance is tested")


@pytest.fixture(scope="session")
def platform(request: pytest.FixtureRequest) -> Platform:
    """The platform under test."""
    return choose_platform(request.config.getoption("--platform", default=None)).platform


@pytest.fixture(scope="session")
def runtime(platform: Platform) -> Iterator[DeviceRuntime]:
    """Its device, bound once for the session."""
    with enter_phase(Phase.WORKER):
        runtime = platform.init_device(WorkerContext())
    yield runtime
    runtime.shutdown()
