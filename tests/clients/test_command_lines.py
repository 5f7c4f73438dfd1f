"""Commands that people run against a server."""

from __future__ import annotations

import json
from pathlib import Path

from mvllm.demo import demo_model_path
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


def test_guidellm(server: ServerProcess, run_client: RunClient, tmp_path: Path) -> None:
    """It finds the server by /health, and streams chats of given lengths, four at a time."""
    report = tmp_path / "report.json"
    run_client(
        *("guidellm", "guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={server.url},model=demo,api_key={KEY}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12"),
        *("--tokenizer", f"kind=huggingface_auto,model={demo_model_path()}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    [benchmark] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    assert {request["output_tokens"] for request in benchmark["requests"]["successful"]} == {16}


def test_vllm_bench_serve(server: ServerProcess, run_client: RunClient, tmp_path: Path) -> None:
    """vLLM's load generator, over completions and over chats."""
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        run_client(
            *("vllm_bench", "vllm", "bench", "serve", "--backend", backend, "--endpoint", endpoint),
            *("--base-url", server.url, "--model", "demo", "--tokenizer", str(demo_model_path())),
            *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"),
            *(
                "--num-prompts",
                "12",
                "--max-concurrency",
                "4",
                "--ignore-eos",
                "--percentile-metrics",
                "ttft,tpot,itl,e2el",
            ),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", f"{backend}.json"),
        )
        result = json.loads((tmp_path / f"{backend}.json").read_text(encoding="utf-8"))
        assert (result["completed"], result["failed"], result["total_output_tokens"]) == (12, 0, 192)
        assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0 and result["mean_e2el_ms"] > 0
