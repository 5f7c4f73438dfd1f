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
COMPLETIONS = "/v1/completions"


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
    chat = Server(folder, "x")
    assert chat.post({**ASK, "reasoning_effort": effort}).status_code == 200
    switch = effort != "none"
    assert chat.core.prompts[0] == f"2 + 2?{[effort, switch, switch]}"


def test_template_arguments_of_the_request_win_over_the_effort(folder: str) -> None:
    server = Server(folder, "x")
    server.post({**ASK, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "thinking": 1}})
    assert server.core.prompts[0].endswith("['none', True, 1]")


def test_an_unknown_effort_is_rejected(folder: str) -> None:
    error = Server(folder, "x").post({**ASK, "reasoning_effort": "huge"})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "reasoning_effort")
    assert "minimal, low, medium" in error.json()["error"]["message"]


def check_budget(folder: str, parser: str, end: str) -> None:
    """A budget ends the thoughts by the format's tag."""
    for body, path in (
        (ASK, "/v1/chat/completions"),
        ({"prompt": "2 + 2?"}, COMPLETIONS),
    ):
        server = Server(folder, "x", reasoning_parser=parser)
        assert server.post({**body, "thinking_token_budget": 5}, path).status_code == 200, (body, path)
        params = server.core.requests[0].sampling_params
        assert params.thinking_token_budget == 5 and params.thinking_tokens is not None
        assert params.thinking_tokens.forced == TOKENIZER.encode(end, add_special_tokens=False)
        assert params.thinking_tokens.starts


def test_a_budget_ends_the_thoughts_of_the_parsers_format(folder: str) -> None:
    check_budget(folder, "qwen3", "</think>")


def test_the_prompt_decides_whether_the_budget_counts_from_the_beginning_or_not_at_all(folder: str) -> None:
    opened, closed = Server(folder, "x"), Server(folder, "x")
    opened.post({**ASK, "thinking_token_budget": 5, "chat_template_kwargs": {"opened": True}})
    closed.post({**ASK, "thinking_token_budget": 5, "chat_template_kwargs": {"closed": True}})
    params = opened.core.requests[0].sampling_params
    assert params.thinking_tokens is not None and not params.thinking_tokens.starts
    assert closed.core.requests[0].sampling_params.thinking_token_budget is None


def check_budget_without_opening_tag(folder: str, path: str, parser: str, implicit_ends: list[str]) -> None:
    """The budget of a format whose outputs begin within the thoughts."""
    bodies = {COMPLETIONS: {"prompt": "2 + 2?"}}
    server = Server(folder, "x", reasoning_parser=parser)
    assert server.post({**bodies.get(path, ASK), "thinking_token_budget": 5}, path).status_code == 200
    params = server.core.requests[0].sampling_params
    assert params.thinking_token_budget == 5 and not params.thinking_tokens.starts
    ends = [TOKENIZER.encode(text, add_special_tokens=False) for text in implicit_ends]
    assert params.thinking_tokens.implicit_ends == ends
    closed = {"prompt": "2 + 2?<think></think>"} if path == COMPLETIONS else {"chat_template_kwargs": {"closed": True}}
    body = {**bodies.get(path, ASK), "thinking_token_budget": 5, **closed}
    assert server.post(body, path).status_code == 200
    assert server.core.requests[1].sampling_params.thinking_token_budget is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
def test_thoughts_that_no_tag_opens_have_a_budget_if_the_format_always_reasons(folder: str, path: str) -> None:
    check_budget_without_opening_tag(folder, path, "deepseek_r1", [])


CONTINUED = [
    ("<think>I add", True),
    ("<think>\nI add two", True),
    ("<think>I add.</think>Four", False),
    ("Four", False),
]


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(("begun", "is_thought"), CONTINUED)
def test_a_continued_message_has_a_budget_if_it_ends_within_thoughts(
    folder: str, parser: str, begun: str, is_thought: bool
) -> None:
    check_continued(folder, parser, begun, is_thought)


def check_continued(folder: str, parser: str, begun: str, is_thought: bool) -> None:
    """No tag opens the thoughts in the output: the prefilled message has done so."""
    server = Server(folder, " and two.</think>It is four." if is_thought else " is the sum.", reasoning_parser=parser)
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    settings: dict[str, Any] = {"thinking_token_budget": 1024, "continue_final_message": True}
    answer = server.post({**settings, "messages": messages}).json()
    assert server.core.prompts[0] == "2 + 2?" + begun
    params = server.core.requests[0].sampling_params
    if is_thought:
        assert params.thinking_token_budget == 1024 and not params.thinking_tokens.starts
    else:
        assert params.thinking_token_budget is None
    expected = ("and two.", "It is four.") if is_thought else (None, " is the sum.")
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content") or message.get("reasoning"), message["content"]) == expected


def test_a_budget_applies_with_a_constraint_and_several_choices_of_a_continued_message(folder: str) -> None:
    server = Server(folder, " and two.</think>4")
    messages = [*ASK["messages"], {"role": "assistant", "content": [{"type": "text", "text": "<think>I add"}]}]
    constraint = {"structured_outputs": {"choice": ["4"]}, "n": 2, "temperature": 1}
    body = {**constraint, "messages": messages, "continue_final_message": True, "thinking_token_budget": 3}
    assert server.post(body).status_code == 200
    for request in server.core.requests:
        params = request.sampling_params
        assert params.thinking_token_budget == 3 and not params.thinking_tokens.starts
        assert params.structured_outputs.thoughts_end == "</think>"
        assert params.structured_outputs.thoughts_start is None


def test_a_prompt_that_ends_within_thoughts_leaves_them_open(folder: str) -> None:
    for prompt, is_open in (
        ("2 + 2?<think>I add", True),
        ("2 + 2?<think>I add.</think> and", False),
        ("<think>?<|im_end|>2 + 2", False),
        ("2 + 2", False),
    ):
        server = Server(folder, "x")
        assert server.post({"prompt": prompt, "thinking_token_budget": 5}, COMPLETIONS).status_code == 200
        params = server.core.requests[0].sampling_params
        assert params.thinking_token_budget == 5 and bool(params.thinking_tokens.starts) is not is_open


def test_a_budget_without_known_tags_is_rejected(folder: str) -> None:
    error = Server(folder, "x", reasoning_parser=None).post({**ASK, "thinking_token_budget": 5})
    assert error.status_code == 400 and error.json()["error"]["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in error.json()["error"]["message"]
    error = Server(folder, "x").post({**ASK, "thinking_token_budget": -1})
    assert error.status_code == 400 and error.json()["error"]["param"] == "thinking_token_budget"
