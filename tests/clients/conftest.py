"""A server on the demo model, and the environment in which the programs of others are installed.

They have one of their own, since what they require contradicts what we do: `python3 ci/matrix.py run clients` makes it,
as ci/constraints/clients.txt says, and runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "lanes" / "clients" / "bin" / "python"
KEY = "a-key"

RunClient = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    options = ("--port", "0", "--dtype", "float32", "--tool-call-parser", "hermes", *SMALL)
    with ServerProcess(tmp_path_factory.mktemp("server"), "demo", *options, MVLLM_API_KEY=KEY) as server:
        server.wait_ready()
        pids = server.pids()
        yield server
        assert server.pids() == pids
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="session")
def run_client(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> RunClient:
    """Runs Python with arguments in the clients' environment; nothing of ours is on its path, and no network used."""
    assert PYTHON.exists(), f"there is no {PYTHON}; make it and run these tests: python3 ci/matrix.py run clients"
    home = tmp_path_factory.mktemp("client")
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "MVLLM_API_KEY")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ours},
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network what models cost
        "NO_PROXY": "127.0.0.1",
        "OPENAI_API_KEY": KEY,
        "PYTHONNOUSERSITE": "1",
    }

    def run(*arguments: str | Path, cwd: Path = home) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [PYTHON, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=480
        )
        assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
        return ran

    return run


@pytest.fixture(scope="session")
def run_program(server: ServerProcess, run_client: RunClient) -> Callable[[str], dict[str, Any]]:
    """Runs one of `programs`, which prints what it has found as JSON."""

    def run(name: str) -> dict[str, Any]:
        ran = run_client(Path(__file__).parent / "programs" / f"{name}.py", f"{server.url}/v1")
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found

    return run
