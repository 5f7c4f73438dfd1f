"""One server with the demo model, shared by the tests of this folder that need no special server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, "demo", "--port", "0", "--served-model-name", "demo", "little", *SMALL) as server:
        yield server.wait_ready()
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client
