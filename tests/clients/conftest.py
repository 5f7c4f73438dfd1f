"""Servers, and programs that use them in environments of their own.

What clients require contradicts what we do, and one another, so that each has its environment (`environments`). A
client that cannot be installed on this machine is skipped, with the installer's reason; with the variable
CLIENTS_REQUIRED, as `ci/matrix.py run clients` sets it, its tests fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mvllm.demo import demo_model_path
from tests.clients.environments import REQUIRED, ROOT, NotInstalled, node_environment, python_environment
from tests.clients.scripted_replies import VARIABLE
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

PROGRAMS = Path(__file__).parent / "programs"
KEY = "a-key"
BUSY_KEY = "busy-key"
"""A key that may have one request in flight, so that others get 429 and are tried again by SDKs."""

RunClient = Callable[..., subprocess.CompletedProcess[str]]
RunProgram = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.txt"
    keys.write_text(f"{KEY}\n{BUSY_KEY} concurrent_requests=1\n", encoding="utf-8")
    options = ("--port", "0", "--dtype", "float32", "--tool-call-parser", "hermes", "--api-key-file", str(keys), *SMALL)
    with ServerProcess(folder, "demo", *options) as server:
        server.wait_ready()
        pids = server.pids()
        yield server
        assert server.pids() == pids
    assert_nothing_left(server.tag, before)


class ScriptedServer:
    """A server whose model writes given replies.

    Attributes:
        server: The server. The model's name is `demo`; its context is long enough for the instructions of agents.
    """

    def __init__(self, server: ServerProcess, replies: Path) -> None:
        self.server = server
        self._replies = replies

    def say(self, *replies: tuple[str, str]) -> None:
        """Sets the replies: each to prompts that contain the word before it, the first matching one counts."""
        self._replies.write_text(json.dumps(replies), encoding="utf-8")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    shutil.copytree(demo_model_path(), folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    size = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1 << 17,
    }
    (folder / "model" / "config.json").write_text(json.dumps({**config, **size}), encoding="utf-8")
    replies = folder / "replies.json"
    replies.write_text("[]", encoding="utf-8")
    processor = "tests.clients.scripted_replies:ScriptedReplies"
    options = (
        *("--port", "0", "--dtype", "float32", "--load-format", "dummy", "--served-model-name", "demo"),
        *("--tool-call-parser", "hermes", "--logits-processors", processor, *SMALL),
    )
    environment = {"PYTHONPATH": str(ROOT), VARIABLE: str(replies), "MVLLM_API_KEY": KEY}
    with ServerProcess(folder, str(folder / "model"), *options, **environment) as server:
        server.wait_ready()
        yield ScriptedServer(server, replies)


@pytest.fixture(scope="session")
def client_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of clients: nothing of ours is on their path, and they use no network."""
    home = tmp_path_factory.mktemp("client")
    names = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network what models cost
        "NO_PROXY": "127.0.0.1",
        "OPENAI_API_KEY": KEY,
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": str(home / "pycache"),
    }


@pytest.fixture(scope="session")
def run_client(client_environment: dict[str, str]) -> RunClient:
    """Runs a command in the environment of a client, which is created first."""

    def run(
        name: str, *arguments: str | Path, cwd: Path | None = None, seconds: int = 480, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        try:
            python = python_environment(name)
        except NotInstalled as e:
            not_installed(name, e)
        path = f"{python.parent}{os.pathsep}{client_environment['PATH']}"
        command: Sequence[str | Path] = arguments
        if not arguments or str(arguments[0]).startswith("-") or str(arguments[0]).endswith(".py"):
            command = (python, *arguments)
        else:
            command = (python.parent / arguments[0], *arguments[1:])
        return check(command, cwd, {**client_environment, "PATH": path, **variables}, seconds)

    return run


@pytest.fixture(scope="session")
def run_node(client_environment: dict[str, str]) -> RunClient:
    """Runs a program of a client for Node.js: a .mjs file of `programs`, or a command that a package brings."""

    def run(
        name: str, *arguments: str | Path, cwd: Path | None = None, seconds: int = 480, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        try:
            folder = node_environment(name)
        except NotInstalled as e:
            not_installed(name, e)
        first = arguments[0]
        if isinstance(first, Path):  # a module finds its packages beside itself
            shutil.copy(first, folder / first.name)
            command: Sequence[str | Path] = ("node", folder / first.name, *arguments[1:])
        else:
            command = (folder / "node_modules" / ".bin" / first, *arguments[1:])
        return check(command, cwd, {**client_environment, **variables}, seconds)

    return run


def not_installed(name: str, reason: NotInstalled) -> NoReturn:
    """Skips the test of a client that cannot be installed, or fails it where every client has to be tested."""
    message = f"{name} cannot be installed here: {reason}"
    if os.environ.get(REQUIRED):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def check(
    command: Sequence[str | Path], cwd: Path | None, environment: dict[str, str], seconds: int
) -> subprocess.CompletedProcess[str]:
    """Runs a command without input; fails the test with its output unless its exit status is 0."""
    ran = subprocess.run(
        command,
        cwd=cwd or environment["HOME"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
    return ran


@pytest.fixture(scope="session")
def run_program(server: ServerProcess, run_client: RunClient, run_node: RunClient) -> RunProgram:
    """Runs the program of a client, which prints what it has found as JSON. It gets the server's address with /v1."""

    def run(name: str, **variables: str) -> dict[str, Any]:
        url = f"{server.url}/v1"
        if (node := PROGRAMS / f"{name}.mjs").exists():
            ran = run_node(name, node, url, **variables)
        else:
            ran = run_client(name, PROGRAMS / f"{name}_program.py", url, **variables)
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found

    return run
