"""What the tests with a server of several models share."""

from __future__ import annotations

from typing import Any

import httpx2
import psutil

from tests.helpers.processes import tagged_processes
from tests.helpers.server import ServerProcess

ADMIN = {"authorization": "Bearer boss"}


def states(client: httpx2.Client) -> dict[str, str]:
    """The states of all names."""
    return {card["id"]: card["status"]["value"] for card in client.get("/v1/models").json()["data"]}


def loaded(client: httpx2.Client, *, aliases: tuple[str, ...] = ("gpt-4o",)) -> set[str]:
    """The loaded models."""
    return {name for name, state in states(client).items() if state == "loaded" and name not in aliases}


def complete(client: httpx2.Client, model: str, **more: object) -> dict[str, Any]:
    """The response to a short request, for which the model is loaded."""
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def load_only(client: httpx2.Client, *names: str) -> None:
    """Leaves exactly these models loaded, the last named used last."""
    for name in loaded(client) - set(names):
        assert client.post("/models/unload", json={"model": name}, headers=ADMIN).json()["was_loaded"]
    for name in names:
        complete(client, name)
    assert loaded(client) == set(names)


def model_process(server: ServerProcess, name: str) -> psutil.Process:
    [found] = [each for each in tagged_processes(server.tag) if f"Model_{name}" in each.cmdline()]
    return found


def engine_core(server: ServerProcess, name: str) -> psutil.Process:
    children = model_process(server, name).children(recursive=True)
    [core] = [child for child in children if "EngineCore" in child.cmdline()]
    return core
