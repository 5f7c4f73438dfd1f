"""Reasoning over HTTP: its tokens in the usage, the effort, and the thinking budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mvllm.entrypoints.openai.protocol import REASONING_EFFORTS
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import Server

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{{ [reasoning_effort, enable_thinking, thinking] if reasoning_effort is defined else '' }}"
    "{{ '<think>' if opened is defined }}{{ '<think></think>' if closed is defined }}"
)
THOUGHTS, ANSWER = "<think>I add two and two.</think>", "Four, says the sum."
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2?"}]}
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def usage_of_stream(server: Server, **more: Any) -> dict[str, Any]:
    lines = server.post({**ASK, "stream": True, "stream_options": {"include_usage": True}, **more}).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]["usage"]


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}, {"n": 2, "temperature": 1}], ids=str)
@pytest.mark.parametrize("text", [THOUGHTS + ANSWER, ANSWER, THOUGHTS[:20]], ids=["thoughts", "no thoughts", "cut off"])
def test_usage_has_the_tokens_of_the_reasoning(folder: str, text: str, more: dict[str, Any]) -> None:
    server = Server(folder, text)
    usage = server.post({**ASK, **more}).json()["usage"]
    found = usage["completion_tokens_details"]["reasoning_tokens"]
    reasoning = text.partition(ANSWER)[0]
    per_choice = num_tokens(reasoning) + (reasoning == text)  # with the end token
    assert abs(found - more.get("n", 1) * per_choice) <= more.get("n", 1)  # a token may contain the end of both
    assert usage_of_stream(server, **more) == usage


def test_usage_has_no_reasoning_tokens_without_a_parser(folder: str) -> None:
    assert "completion_tokens_details" not in Server(folder, "x", reasoning_parser=None).post(ASK).json()["usage"]


@pytest.mark.parametrize("effort", REASONING_EFFORTS)
def test_the_effort_reaches_the_template_and_switches_the_thoughts(folder: str, effort: str) -> None:
    chat, responses = Server(folder, "x"), Server(folder, "x")
    assert chat.post({**ASK, "reasoning_effort": effort}).status_code == 200
    assert responses.post({"input": "2 + 2?", "reasoning": {"effort": effort}}, RESPONSES).status_code == 200
    switch = effort != "none"
    assert chat.core.prompts[0] == responses.core.prompts[0] == f"2 + 2?{[effort, switch, switch]}"


def test_template_arguments_of_the_request_win_over_the_effort(folder: str) -> None:
    server = Server(folder, "x")
    server.post({**ASK, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "thinking": 1}})
    assert server.core.prompts[0].endswith("['none', True, 1]")


def test_an_unknown_effort_is_rejected(folder: str) -> None:
    for body, path, param in (
        ({**ASK, "reasoning_effort": "huge"}, "/v1/chat/completions", "reasoning_effort"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, RESPONSES, "reasoning"),
    ):
        error = Server(folder, "x").post(body, path)
        assert (error.status_code, error.json()["error"]["param"]) == (400, param)
        assert "minimal, low, medium" in error.json()["error"]["message"]


def test_a_budget_ends_the_thoughts_of_the_parsers_format(folder: str) -> None:
    end = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("</think>", "[/THINK]")]
    for body, path in (
        (ASK, "/v1/chat/completions"),
        ({"input": "2 + 2?"}, RESPONSES),
        ({"prompt": "2 + 2?"}, COMPLETIONS),
    ):
        for parser, tag in (("qwen3", end[0]), ("mistral", end[1])):
            server = Server(folder, "x", reasoning_parser=parser)
            assert server.post({**body, "thinking_token_budget": 5}, path).status_code == 200, (body, path)
            params = server.core.requests[0].sampling_params
            assert params.thinking_token_budget == 5 and params.thinking_tokens is not None
            assert params.thinking_tokens.forced == tag and params.thinking_tokens.starts


def test_the_prompt_decides_whether_the_budget_counts_from_the_beginning_or_not_at_all(folder: str) -> None:
    opened, closed = Server(folder, "x"), Server(folder, "x")
    opened.post({**ASK, "thinking_token_budget": 5, "chat_template_kwargs": {"opened": True}})
    closed.post({**ASK, "thinking_token_budget": 5, "chat_template_kwargs": {"closed": True}})
    params = opened.core.requests[0].sampling_params
    assert params.thinking_tokens is not None and not params.thinking_tokens.starts
    assert closed.core.requests[0].sampling_params.thinking_token_budget is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS, RESPONSES])
def test_thoughts_that_no_tag_opens_have_a_budget_if_the_format_always_reasons(folder: str, path: str) -> None:
    """Kimi K2 has both: its outputs begin within the thoughts, and a tool call ends them."""
    bodies = {COMPLETIONS: {"prompt": "2 + 2?"}, RESPONSES: {"input": "2 + 2?"}}
    server = Server(folder, "x", reasoning_parser="kimi_k2")
    assert server.post({**bodies.get(path, ASK), "thinking_token_budget": 5}, path).status_code == 200
    params = server.core.requests[0].sampling_params
    call = TOKENIZER.encode("<|tool_calls_section_begin|>", add_special_tokens=False)
    assert params.thinking_token_budget == 5 and not params.thinking_tokens.starts
    assert params.thinking_tokens.implicit_ends == [call]
    closed = {"prompt": "2 + 2?<think></think>"} if path == COMPLETIONS else {"chat_template_kwargs": {"closed": True}}
    body = {**bodies.get(path, ASK), "thinking_token_budget": 5, **closed}
    assert server.post(body, path).status_code == 200
    assert server.core.requests[1].sampling_params.thinking_token_budget is None


def test_a_budget_without_known_tags_is_rejected(folder: str) -> None:
    for parser in (None, "minimax_m2_append_think"):
        error = Server(folder, "x", reasoning_parser=parser).post({**ASK, "thinking_token_budget": 5})
        assert error.status_code == 400 and error.json()["error"]["param"] == "thinking_token_budget"
        assert "--reasoning-parser" in error.json()["error"]["message"]
    error = Server(folder, "x").post({**ASK, "thinking_token_budget": -1})
    assert error.status_code == 400 and error.json()["error"]["param"] == "thinking_token_budget"
