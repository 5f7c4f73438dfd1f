"""Agents edit files through tool calls. A script stands in for the text of a capable model."""

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
    config.write_text(
        f"model:\n  cost_tracking: ignore_errors\n  model_kwargs: {json.dumps(options)}\n", encoding="utf-8"
    )
    run_client(
        *("mini_swe_agent", "mini", "--model", "hosted_vllm/demo", "--config", "mini.yaml", "--config", str(config)),
        *("--task", TASK, "--yolo", "--exit-immediately", "--output", str(project / "trajectory.json")),
        cwd=project,
        MSWEA_CONFIGURED="true",
        MSWEA_SILENT_STARTUP="1",
    )
    assert (project / "sums.py").read_text(encoding="utf-8") == MENDED
    trajectory = json.loads((project / "trajectory.json").read_text(encoding="utf-8"))
    assert trajectory["info"]["exit_status"] == "Submitted"


def test_aider(scripted: ScriptedServer, run_client: RunClient, project: Path) -> None:
    """It makes no tool calls: the model's text contains the edit."""
    block = "sums.py\n```python\n<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n"
    scripted.say((TASK, f"I replace the operator.\n\n{block}"))
    run_client(
        *("aider", "aider", "--model", "openai/demo", "--openai-api-base", f"{scripted.server.url}/v1"),
        *("--openai-api-key", KEY, "--no-git", "--yes-always", "--no-analytics", "--no-check-update"),
        *("--no-show-release-notes", "--no-show-model-warnings", "--edit-format", "diff", "--map-tokens", "0"),
        *("--message", TASK, "sums.py"),
        cwd=project,
    )
    assert (project / "sums.py").read_text(encoding="utf-8") == MENDED


@pytest.mark.parametrize("api", ["openai-compatible", "anthropic"])
def test_opencode(scripted: ScriptedServer, run_node: RunClient, project: Path, api: str) -> None:
    """It reads the file and edits it, through chat completions and through Anthropic's messages."""
    path = str(project / "sums.py")
    scripted.say(
        ("Edit applied", "It is mended."),
        ("1: def add", call("edit", filePath=path, oldString="a - b", newString="a + b")),
        (TASK, "I read it first." + call("read", filePath=path)),
    )
    model = {"name": "demo", "tool_call": True, "limit": {"context": 100_000, "output": 4000}}
    provider = {
        "npm": f"@ai-sdk/{api}",
        "name": "local",
        "options": {"baseURL": f"{scripted.server.url}/v1", "apiKey": KEY},
        "models": {"demo": model},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"local": provider}}
    (project / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    switched_off = ("MODELS_FETCH", "AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    ran = run_node(
        *("opencode", "opencode", "run", "--model", "local/demo", "--auto", TASK),
        cwd=project,
        seconds=120,
        **{f"OPENCODE_DISABLE_{name}": "1" for name in switched_off},
    )
    assert (project / "sums.py").read_text(encoding="utf-8") == MENDED
    assert "It is mended." in ran.stdout


def test_codex(scripted: ScriptedServer, run_node: RunClient, project: Path) -> None:
    """It runs commands through the Responses API. Its tools for further agents are a namespace."""
    command = "sed -i 's/a - b/a + b/' sums.py && cat sums.py"
    scripted.say(
        ("    return a + b", "It is mended."), (TASK, "I replace the operator." + call("exec_command", cmd=command))
    )
    url = f"{scripted.server.url}/v1"
    provider = f'model_providers.local={{name="local",base_url="{url}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    ran = run_node(
        *("codex", "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--model", "demo", "-c", "model_provider=local", "-c", provider, "-c", "web_search=disabled"),
        *("--enable", "multi_agent", TASK),
        cwd=project,
        seconds=120,
    )
    assert (project / "sums.py").read_text(encoding="utf-8") == MENDED
    assert "It is mended." in ran.stdout
