"""Schemathesis, over the description of the API, finds no fault of the server's.

It is started as its users start it: it makes requests that the description permits, ones that it does not, every bound
of every field, and sequences of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, RunClient
from tests.helpers.server import SMALL, ServerProcess

ADMIN = "an-administrator"
START = "from schemathesis.cli import schemathesis; schemathesis()"


def examine(run_client: RunClient, server: ServerProcess, key: str, max_examples: int, *more: str) -> str:
    """Runs schemathesis against a server; returns what it has to say. A failure is its exit status."""
    options = [
        *("--checks", "not_a_server_error", "--max-examples", str(max_examples), "--request-timeout", "300"),
        *("--seed", "1", "--no-color", "--suppress-health-check", "all", "--continue-on-failure"),
        *("--header", f"Authorization: Bearer {key}", *more),
    ]
    return run_client("schemathesis", "-c", START, "run", f"{server.url}/openapi.json", *options).stdout


@pytest.mark.timeout(600)
def test_no_operation_fails(run_client: RunClient, server: ServerProcess) -> None:
    said = examine(run_client, server, KEY, 10)
    assert re.search(r"[0-9]{3,} generated, [0-9]{3,} passed$", said, re.M), said
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.timeout(600)
def test_no_operation_of_administrators_fails(run_client: RunClient, tmp_path: Path) -> None:
    """A server of its own, since they put it to sleep, in which state it takes no requests (503), and pause it."""
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL, MVLLM_ADMIN_API_KEY=ADMIN) as server:
        server.wait_ready()
        pids = server.pids()
        # It waits for the other processes of a group, by default for five minutes.
        excluded = ("--exclude-path", "/init_weight_transfer_engine")
        examine(run_client, server, ADMIN, 10, "--include-tag", "admin", *excluded)
        with server.client(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
            assert client.post("/wake_up").status_code == 200
            client.post("/abandon_weight_update")  # an error without an update
            assert client.post("/resume").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.pids() == pids
