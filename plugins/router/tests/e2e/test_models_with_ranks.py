"""A model of a router with two ranks and adapters: its adapters are models, and come and go with it."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from plugins.router.tests.builders import ADMIN, complete, engine_core, model_process, states

from mvllm.demo import demo_model_path
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.processes import assert_nothing_left, shared_memory_names, wait_until
from tests.helpers.server import ServerProcess

MODELS = """
defaults: {{kv-cache-memory-bytes: 64M, dtype: float32}}
models:
  plain: {{model: demo}}
  tuned: {{model: demo, tensor-parallel-size: 2, enable-lora: true, max-loras: 2, lora-modules: ["first={adapter}"]}}
"""


def text(client: httpx2.Client, model: str) -> str:
    found: str = complete(client, model)["choices"][0]["text"]
    return found


@pytest.mark.exhaustive
def test_adapters_of_a_model_with_two_ranks_are_found_by_their_names(tmp_path: Path) -> None:
    before = shared_memory_names()
    paths = [write_adapter(tmp_path / name, Path(demo_model_path()), seed=i) for i, name in enumerate("ab")]
    (tmp_path / "models.yaml").write_text(MODELS.format(adapter=paths[0]))
    arguments = ("--models", str(tmp_path / "models.yaml"), "--port", "0", "--max-loaded-models", "1")
    with ServerProcess(tmp_path, *arguments, MVLLM_ADMIN_API_KEY="boss") as server:
        with server.wait_ready().client() as client:
            first = text(client, "first")  # loads the model
            assert states(client) == {"plain": "unloaded", "tuned": "loaded", "first": "loaded"}
            workers = [each for each in engine_core(server, "tuned").children() if each.name().startswith("Worker_TP")]
            assert len(workers) == 2, [each.cmdline() for each in engine_core(server, "tuned").children()]
            body = {"lora_name": "second", "lora_path": str(paths[1])}
            added = client.post("/v1/load_lora_adapter?model=tuned", json=body, headers=ADMIN)
            assert added.status_code == 200, added.text
            second, base = text(client, "second"), text(client, "tuned")
            assert len({first, second, base}) == 3
            assert text(client, "plain") == base  # unloads the other
            missing = client.post("/v1/completions", json={"model": "second", "prompt": "x"})
            assert missing.status_code == 404  # it was added to the process that has ended
            assert text(client, "first") == first
            removed = client.post("/v1/unload_lora_adapter?model=tuned", json={"lora_name": "first"}, headers=ADMIN)
            assert removed.status_code == 200, removed.text
            model_process(server, "tuned").kill()
            wait_until(lambda: states(client)["tuned"] == "unloaded", 120, lambda: server.log)
            assert text(client, "tuned") == base  # the next request loads it again
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)
