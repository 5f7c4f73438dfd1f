"""TRL's GRPOTrainer samples from a server and gives it its weights, as docs/examples/grpo_trl.py does.

TRL, and what it needs beside torch and transformers, is in the environment of requirements/trl.txt; the rest is that of
the tests.
"""

from __future__ import annotations

import os
import re
import site
import socket
from pathlib import Path

import httpx2

import mvllm
from tests.clients.conftest import RunClient
from tests.clients.environments import ROOT
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

STEPS = 3


def test_the_trainer_and_the_server_have_the_same_weights_in_every_step(run_client: RunClient, tmp_path: Path) -> None:
    before = shared_memory_names()
    options = ("--port", "0", "--dtype", "float32", "--logprobs-mode", "processed_logprobs", *SMALL)
    key = {"MVLLM_ADMIN_API_KEY": "administrator"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ServerProcess(tmp_path, "demo", *options, **key) as server:
        server.wait_ready()
        ran = run_client(
            *("trl", ROOT / "docs" / "examples" / "grpo_trl.py", "--url", server.url, "--group-port", port),
            *("--steps", str(STEPS), "--group", "4", "--max-tokens", "16", "--output", tmp_path / "output"),
            **key,
            PYTHONPATH=os.pathsep.join([str(Path(mvllm.__file__).parents[1]), *site.getsitepackages()]),
        )
        info = httpx2.get(f"{server.url}/weight_info", headers={"Authorization": "Bearer administrator"}).json()
    assert info == {"weight_version": STEPS, "is_updating": False, "failure": None}
    lines = re.findall(r"^step +(\d+)  reward (\d\.\d+)  difference (\S+)$", ran.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [*range(1, STEPS + 1)], ran.stdout
    # Largest difference of log-probabilities. It would be large with weights of another step.
    assert all(float(difference) < 1e-3 for _, _, difference in lines), ran.stdout
    assert_nothing_left(server.tag, before)
