"""Tools and thoughts over HTTP: the whole application around an engine core that writes what the test has chosen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.app import build_app
from mvllm.entrypoints.openai.chat import ChatPrompts
from mvllm.entrypoints.openai.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.served_models import ServedModels
from mvllm.entrypoints.openai.server_state import ServerState
from mvllm.entrypoints.openai.settings import ServerSettings
from mvllm.entrypoints.openai.text_work import TextWork
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SchedulerStats
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['arguments']['city'] }}{% endfor %}\n{% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WRITTEN = '<think>Hm.</think>Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "tools": TOOLS}


class ScriptedCore:
    """An engine core that writes one text, token by token."""

    platform_summary, cache_summary, stats = "script", None, SchedulerStats()
    num_elsewhere = 0
    heartbeat_age, failure, core_pids = 0.0, None, ()

    def __init__(self, config: Any, text: str, reason: FinishReason) -> None:
        self.config, self.text, self.reason = config, text, reason
        self.prompts: list[str] = []

    def on_sleep(self, callback: Any) -> None:
        pass

    def attach(self, loop: asyncio.AbstractEventLoop, on_outputs: Any, on_death: Any) -> None:
        self.loop, self.on_outputs = loop, on_outputs

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self.prompts.append(TOKENIZER.decode(request.prompt_token_ids))
            self.loop.call_soon(self.write, request.request_id, TOKENIZER.encode(self.text, add_special_tokens=False))

    def write(self, request_id: str, ids: list[int]) -> None:
        if not ids:
            ids = [TOKENIZER.eos_token_id or 0] if self.reason is FinishReason.STOP else []
            self.on_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, ids, self.reason)]))
            return
        self.on_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, ids[:1])]))
        self.loop.call_later(0, self.write, request_id, ids[1:])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        pass

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


class Server:
    def __init__(self, folder: str, text: str = WRITTEN, reason: FinishReason = FinishReason.STOP, **parsers: Any):
        self.core = ScriptedCore(EngineArgs.from_kwargs(model=folder).create_engine_config(), text, reason)
        self.parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3", **parsers}

    def post(self, body: dict[str, Any]) -> httpx.Response:
        async def run() -> httpx.Response:
            engine = AsyncLLM(self.core.config, log_stats=False, client=self.core)  # type: ignore[arg-type]
            text_work = TextWork(engine.tokenizer, engine.model_config.max_model_len)
            state = ServerState(60)
            state.ready(engine, text_work, ChatPrompts(engine, text_work, **self.parsers))
            app = build_app(state, ServedModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), ServerSettings())
            try:
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                    return await client.post("/v1/chat/completions", json=body)
            finally:
                engine.shutdown()
                text_work.close()

        return asyncio.run(run())

    def message(self, **more: Any) -> tuple[dict[str, Any], str]:
        [choice] = self.post({**ASK, **more}).json()["choices"]
        return choice["message"], choice["finish_reason"]


def test_an_answer_comes_in_its_parts(folder: str) -> None:
    server = Server(folder)
    message, reason = server.message()
    assert reason == "tool_calls"
    assert message["content"] == "Let me see." and message["reasoning"] == "Hm." == message["reasoning_content"]
    [call] = message["tool_calls"]
    assert call["type"] == "function" and call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "weather" in server.core.prompts[0]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stream_has_the_same_parts(folder: str, reason: FinishReason) -> None:
    server = Server(folder, reason=reason)
    whole, why = server.message()
    assert why == ("tool_calls" if reason is FinishReason.STOP else "length")
    lines = server.post({**ASK, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]
    opening, *pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert opening["index"] == 0 and opening["id"] and opening["type"] == "function"
    assert opening["function"]["name"] == "weather"
    arguments = opening["function"]["arguments"] + "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == '{"city": "Paris"}' and not any(
        "id" in piece or "name" in piece["function"] for piece in pieces
    )
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [why]


def test_without_tools_or_with_none_wanted_calls_are_text(folder: str) -> None:
    for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message, reason = Server(folder).message(**more)
        assert "<tool_call>" in message["content"] and "tool_calls" not in message and reason == "stop"
    message, _ = Server(folder, reasoning_parser=None, tool_parser=None).message(tools=None)
    assert message["content"] == WRITTEN


def test_what_cannot_be_promised_is_refused(folder: str) -> None:
    broken = {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}
    another = {"type": "function", "function": {"name": "clock"}}
    for server, more, param in (
        (Server(folder, tool_parser=None), {}, "tools"),
        (Server(folder), {"tool_choice": "perhaps"}, "tool_choice"),
        (Server(folder), {"tool_choice": another}, "tool_choice"),
        (Server(folder), {"tool_choice": "required", "tools": None}, "tool_choice"),
        (Server(folder), {"messages": [broken]}, "messages"),
    ):  # fmt: skip
        answer = server.post({**ASK, **more})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(
    ("choice", "written", "ended"),
    [
        ("required", '[{"name": "weather", "arguments": {"city": "Paris"}}]', "tool_calls"),
        (NAMED, '{"city": "Paris"}', "stop"),
    ],
    ids=["required", "named"],
)
def test_a_call_that_must_be_is_read_from_its_json(
    folder: str, choice: object, written: str, ended: str, reason: FinishReason
) -> None:
    """Without a parser of the model family's format, and with one for thoughts, of which there are none then."""
    for parsers in ({"tool_parser": None}, {"reasoning_parser": "deepseek_r1"}):
        server = Server(folder, written, reason, **parsers)
        message, why = server.message(tool_choice=choice)
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert message["content"] is None and "reasoning" not in message
        assert why == (ended if reason is FinishReason.STOP else "length")
        lines = server.post({**ASK, "tool_choice": choice, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        pieces = [piece for chunk in chunks for piece in chunk["delta"].get("tool_calls", ())]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Paris"}'
        assert not any(chunk["delta"].get("content") for chunk in chunks) and chunks[-1]["finish_reason"] == why


def test_earlier_calls_reach_the_template_as_objects(folder: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    server = Server(folder)
    server.message(messages=messages)
    assert "Rome" in server.core.prompts[0] and "sunny" in server.core.prompts[0]


def test_thoughts_can_be_kept_back(folder: str) -> None:
    message, _ = Server(folder).message(include_reasoning=False, tools=None)
    assert "reasoning" not in message and "Hm." not in message["content"]
