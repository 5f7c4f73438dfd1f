"""Stored responses of a real server: two API servers share them, and they survive SIGKILL and a restart."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from tests.e2e.server.test_multi_api_server import clients_of_each
from tests.helpers.processes import tagged_processes, wait_until
from tests.helpers.server import SMALL, ServerProcess

ENDLESS: dict[str, Any] = {"input": "Go on.", "max_output_tokens": 900, "ignore_eos": True, "temperature": 0}


def run_server(folder: Path, *arguments: str) -> ServerProcess:
    store = str(folder / "responses.db")
    return ServerProcess(folder, "demo", "--port", "0", "--responses-store", store, *SMALL, *arguments)


def post(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_api_servers_share_responses_which_survive_sigkill(tmp_path: Path) -> None:
    with run_server(tmp_path, "--api-server-count", "2") as server:
        server.wait_ready()
        with ExitStack() as stack:
            one, other = clients_of_each(server, stack)
            first = post(one, "/v1/responses", input="What is the capital of Italy?", temperature=0)
            assert other.get(f"/v1/responses/{first['id']}").json() == first
            on = post(other, "/v1/responses", input="And of France?", previous_response_id=first["id"], temperature=0)
            conversation = post(other, "/v1/conversations", items=[{"role": "user", "content": "Hello."}])
            post(one, "/v1/responses", input="Who are you?", conversation=conversation["id"], temperature=0)

            cancelled = post(one, "/v1/responses", background=True, **ENDLESS)
            assert post(other, f"/v1/responses/{cancelled['id']}/cancel")["status"] == "cancelled"
            with one.stream("POST", "/v1/responses", json={**ENDLESS, "background": True, "stream": True}) as stream:
                lines = stream.iter_lines()
                running_id = next(line for line in lines if '"resp_' in line).split('"id":"')[1].split('"')[0]
            with other.stream("GET", f"/v1/responses/{running_id}?stream=true&starting_after=3") as stream:
                numbers = [line for line in stream.iter_lines() if line.startswith("data: ")]
            assert '"sequence_number":4,' in numbers[0] and "response.incomplete" in numbers[-1]

            interrupted = post(one, "/v1/responses", background=True, **{**ENDLESS, "max_output_tokens": 1000})
            shown = f"/v1/responses/{interrupted['id']}"
            wait_until(lambda: other.get(shown).json()["status"] == "in_progress", 120, lambda: server.log)
            for process in tagged_processes(server.tag):
                process.kill()
        server.wait()
    with run_server(tmp_path) as server:
        server.wait_ready()
        assert "1 were interrupted" in server.log
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            assert sdk.responses.retrieve(first["id"]).to_dict()["output"] == first["output"]
            failed = sdk.responses.retrieve(interrupted["id"])
            assert failed.status == "failed" and failed.error is not None and "ended before" in failed.error.message
            more = sdk.responses.create(model="demo", input="And of Spain?", previous_response_id=on["id"])
            assert more.status == "completed"
            assert len(list(sdk.conversations.items.list(conversation["id"]))) == 3
            # A response in the background may finish after SIGTERM.
            last = sdk.responses.create(model="demo", input="Hi.", background=True)
            server.signal(signal.SIGTERM)
        assert server.wait() == 0
    with run_server(tmp_path) as server:
        server.wait_ready()
        with server.client() as client:
            assert client.get(f"/v1/responses/{last.id}").json()["status"] == "completed"
        assert "0 were interrupted" in server.log
