"""Agents edit files through tool calls. A script stands in for the text of a capable model; all else is the server's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, RunClient, ScriptedServer

BROKEN = "def add(a, b):\n    return a - b\n"
MENDED = "def add(a, b):\n    return a + b\n"
TASK = "Mend the function add in sums.py."


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text(BROKEN, encoding="utf-8")
    return tmp_path


def call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_mini_swe_agent(scripted: ScriptedServer, run_client: RunClient, project: Path) -> None:
    """It calls the tool `bash` through litellm, and gets each command's output."""
    scripted.say(
        ("a + b", "It is mended." + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
        ('"output": ""', call("bash", command="cat sums.py")),
        (TASK, "I replace the operator." + call("bash", command="sed -i 's/a - b/a + b/' sums.py")),
    )
    options = {"api_base": f"{scripted.server.url}/v1", "api_key": KEY}
    config = project / "agent.yaml"
    default = "mini.yaml"
    config.write_text(f"model:\n  cost_tracking: ignore_errors\n  model_kwargs: {json.dumps(options)}\n", encoding="utf-8")
    run_client(
        *("mini_swe_agent", "mini", "--model", "hosted_vllm/demo", "--config", default, "--config", str(config)),
        *("--task", TASK, "--yolo", "--exit-immediately", "--output", str(project / "trajectory.json")),
        cwd=project,
        MSWEA_CONFIGURED="true",
        MSWEA_SILENT_STARTUP="1",
    )
    assert (project / "sums.py").read_text(encoding="utf-8") == MENDED
    trajectory = json.loads((project / "trajectory.json").read_text(encoding="utf-8"))
    assert trajectory["info"]["exit_status"] == "Submitted"
