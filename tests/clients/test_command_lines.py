"""Commands that people run against a server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import KEY, RunClient, ScriptedServer
from tests.helpers.server import ServerProcess

QUESTION = "What is the capital of Italy?"
ANSWER = "The capital of Italy is Rome."


def test_llm(server: ServerProcess, scripted: ScriptedServer, run_client: RunClient, tmp_path: Path) -> None:
    """simonw's llm: a prompt, streamed and not, a schema, a conversation, and a function that the model calls."""
    models = [
        {
            "model_id": name,
            "model_name": "demo",
            "api_base": f"{at.url}/v1",
            "api_key_name": "local",
            "supports_tools": True,
            "supports_schema": True,
        }
        for name, at in (("demo", server), ("scripted", scripted.server))
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"local": KEY}), encoding="utf-8")
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")

    def llm(*arguments: str) -> str:
        command = ("llm", "llm", *arguments, "-o", "temperature", "0")
        return run_client(*command, LLM_USER_PATH=str(tmp_path)).stdout.strip()

    assert llm("-m", "demo", QUESTION) == ANSWER
    assert llm("-m", "demo", QUESTION, "--no-stream") == ANSWER
    assert llm("-m", "demo", "Name another.", "-c", "-o", "max_tokens", "4")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    assert list(json.loads(llm("-m", "demo", QUESTION, "--schema", json.dumps(schema)))) == ["on"]
    request = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    scripted.say(("It rains in Rome", "Take an umbrella."), ("weather", request))
    function = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return f'It rains in {city}'"
    assert llm("-m", "scripted", "How is the weather in Rome?", "--functions", function) == "Take an umbrella."
