"""Schemathesis, over the whole description of the API and without exclusions, finds no fault of the server's.

It is started as its users start it: it makes requests that the description permits, ones that it does not, every bound
of every field, and sequences of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.server import SMALL, ServerProcess

ADMIN = "an-administrator"


@pytest.fixture(autouse=True)
def works_as_before(server: ServerProcess, client: httpx.Client) -> Iterator[None]:
    before = server.pids()
    yield
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert server.pids() == before


def examine(server: ServerProcess, folder: Path, max_examples: int, *more: str) -> str:
    """Runs schemathesis against a server; returns what it has to say."""
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    options = [
        *("--checks", "not_a_server_error", "--max-examples", str(max_examples), "--request-timeout", "300"),
        *("--seed", "1", "--no-color", "--suppress-health-check", "all", "--continue-on-failure", *more),
    ]
    ran = subprocess.run(
        [*command, f"{server.url}/openapi.json", *options], cwd=folder, capture_output=True, text=True, timeout=3000
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    return ran.stdout


def test_no_operation_fails(server: ServerProcess, tmp_path: Path) -> None:
    said = examine(server, tmp_path, 5, "--phases", "examples,fuzzing,stateful")
    print(said)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_operation_fails_in_any_phase(server: ServerProcess, tmp_path: Path) -> None:
    print(examine(server, tmp_path, 300))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_operation_of_administrators_fails(tmp_path: Path) -> None:
    """A server of its own, since they put it to sleep, in which state it takes no requests (503)."""
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL, MVLLM_ADMIN_API_KEY=ADMIN) as server:
        server.wait_ready()
        pids = server.pids()
        key = ("--header", f"Authorization: Bearer {ADMIN}")
        print(examine(server, tmp_path, 100, *key, "--include-tag", "admin"))
        with server.client(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
            assert client.post("/wake_up").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.pids() == pids
