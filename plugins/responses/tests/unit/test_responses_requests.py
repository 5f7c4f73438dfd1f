"""What requests for responses share with core's APIs, and what clients of other engines send."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from mvllm.entrypoints.openai.client_request import ClientRequest
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.messages.requests import FinishReason
from mvllm_responses.protocol import ResponsesRequest
from tests.unit.entrypoints.builders import TOKENIZER, save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server
from tests.unit.entrypoints.test_reasoning_requests import TEMPLATE as REASONING_TEMPLATE
from tests.unit.entrypoints.test_text_after_prompts import KIND, make_server, streamed
from tests.unit.entrypoints.test_text_after_prompts import TEMPLATE as SPACED_TEMPLATE
from tests.unit.entrypoints.test_unknown_fields import found

RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {RESPONSES: {"input": "Hello."}}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LONG = "many words " * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def reasoning_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("reasoning"), REASONING_TEMPLATE)


def test_a_text_that_cannot_fit_is_not_rendered(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def render(*unused: object) -> str:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(TokenizerPool, "render", render)
    answer = Server(folder, "x").post({"input": LONG}, RESPONSES)
    assert answer.status_code == 400 and "1100" in answer.text and "max_model_len" in answer.text


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_conversation_far_over_the_context_loses_its_oldest_messages(folder: str, role: str) -> None:
    hello, last = ({"role": "user", "content": text} for text in ("hi", "the last"))
    server = Server(folder, "x")
    with contextlib.closing(ChatTemplateRenderer()) as server.templates:
        body = {"input": [hello, {"role": role, "content": LONG * 5}, last], "truncation": "auto"}
        answer = server.post(body, RESPONSES)
    assert answer.status_code == 200, answer.text
    [prompt] = server.core.prompts
    assert "the last" in prompt and "many" not in prompt


def test_integral_floats_are_integers(folder: str) -> None:
    server = Server(folder, "Hello you.")
    assert server.post({"input": "Hello.", "max_output_tokens": 4.0}, RESPONSES).status_code == 200
    assert server.core.requests[0].sampling_params.max_tokens == 4


def test_parts_of_every_kind_of_text_and_tools_of_their_own_form(folder: str) -> None:
    kinds = ("text", "input_text", "output_text")
    parts = [*({"type": kind, "text": kind} for kind in kinds), {"type": "refusal", "refusal": "refusal"}, "plain"]
    server = Server(folder, CALL)
    answer = server.post({"input": [{"role": "user", "content": parts}], "tools": [FUNCTION]}, RESPONSES)
    assert answer.status_code == 200 and "\n".join([*kinds, "refusal", "plain"]) in server.core.prompts[0]
    assert answer.json()["output"][0]["name"] == "weather"


def test_unknown_and_unsupported_fields(folder: str) -> None:
    body = {"text": {"format": {"type": "text"}, "x": 1}, "reasoning": {"efort": 1}}
    assert found(ResponsesRequest, body) == ["text.x", "reasoning.efort"]
    assert found(ResponsesRequest, dict.fromkeys(ClientRequest.__struct_fields__)) == []
    for field in ("previous_response", "media_io_kwargs", "context_management", "moderation"):
        given: Any = [{"type": "x"}] if field == "context_management" else {"a": 1}
        answer = Server(folder, "x").post({"input": "Hello.", field: given}, RESPONSES)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_the_effort_and_the_budget_of_the_thoughts(reasoning_folder: str) -> None:
    server = Server(reasoning_folder, "x")
    assert server.post({"input": "2 + 2?", "reasoning": {"effort": "high"}}, RESPONSES).status_code == 200
    assert server.core.prompts[0] == "2 + 2?['high', True, True]"
    error = server.post({"input": "x", "reasoning": {"effort": "huge"}}, RESPONSES)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "reasoning")
    for parser, tag in (("qwen3", "</think>"), ("mistral", "[/THINK]")):
        server = Server(reasoning_folder, "x", reasoning_parser=parser)
        assert server.post({"input": "2 + 2?", "thinking_token_budget": 5}, RESPONSES).status_code == 200
        params = server.core.requests[0].sampling_params
        assert params.thinking_token_budget == 5
        assert params.thinking_tokens.forced == TOKENIZER.encode(tag, add_special_tokens=False)


def arguments_of_the_call(server: Server) -> list[str]:
    """The arguments of the one call, as JSON text: whole and streamed."""
    body = {"input": "What is the weather?", "tools": [{"type": "function", **FUNCTION}]}
    [item] = [one for one in server.post(body, RESPONSES).json()["output"] if one["type"] == "function_call"]
    kind = "response.function_call_arguments"
    events = streamed(server.post({**body, "stream": True}, RESPONSES).text)
    deltas = "".join(one["delta"] for one in events if one["type"] == f"{kind}.delta")
    return [item["arguments"], deltas, *(one["arguments"] for one in events if one["type"] == f"{kind}.done")]


def test_the_arguments_of_a_call_without_an_end_are_json_unless_it_was_cut_off(folder: str) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "re": "\\d", '
    whole = arguments_of_the_call(Server(folder, text))
    assert len(whole) == 3 and all(json.loads(one) == {"city": "Paris", "re": "\\d"} for one in whole)
    cut = arguments_of_the_call(Server(folder, text, FinishReason.LENGTH))
    assert len(cut) == 3 and len(set(cut)) == 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut[0])


def test_the_first_word_keeps_its_space(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With tokenizers whose decoder drops the space of the first word."""
    spaced = save_model_folder(tmp_path_factory.mktemp("spaced"), SPACED_TEMPLATE, KIND)
    asked = {"input": "What is it?", "include": ["message.output_text.logprobs"]}
    [item] = make_server(spaced).post(asked, RESPONSES).json()["output"]
    [part] = item["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == " a small text"
    events = streamed(make_server(spaced).post({**asked, "stream": True}, RESPONSES).text)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == " a small text"


class TestResponses:
    def test_a_response_repeats_its_penalties_and_all_fields_of_its_functions(self, folder: str) -> None:
        tools = [{"type": "function", **FUNCTION, "strict": True}, {"type": "function", "name": "other"}]
        given = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
        server = Server(folder, "Hello you.")
        plain, full = (
            server.post({**BODIES[RESPONSES], **more}, RESPONSES).json() for more in ({}, {**given, "tools": tools})
        )
        assert {name: plain[name] for name in given} == dict.fromkeys(given, 0.0) and plain["tools"] == []
        assert {name: full[name] for name in given} == given
        shown = [
            tuple(tool[name] for name in ("name", "description", "parameters", "strict")) for tool in full["tools"]
        ]
        assert shown == [("weather", None, {"type": "object"}, True), ("other", None, None, False)]

    def test_the_end_of_a_calls_arguments_names_the_function(self, folder: str) -> None:
        body = {**BODIES[RESPONSES], "tools": [{"type": "function", **FUNCTION}], "stream": True}
        answer = Server(folder, CALL).post(body, RESPONSES)
        [done] = [line for line in answer.text.splitlines() if '"response.function_call_arguments.done"' in line]
        assert json.loads(done.removeprefix("data: "))["name"] == "weather"

    def test_input_tokens_are_those_of_the_prompt_that_would_run(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
        history = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
        bodies: list[dict[str, Any]] = [
            {"input": "Hello."},
            {"input": [*history, {"role": "user", "content": "Bye."}], "instructions": "Be short.", "tools": tools},
            {"input": [*history * 30, {"role": "user", "content": "Bye."}], "truncation": "auto"},
            {"instructions": "Be short."},
        ]
        made = server.exchange(*(("POST", RESPONSES, body) for body in bodies))
        num_requests = len(server.core.requests)
        counted = server.exchange(*(("POST", f"{RESPONSES}/input_tokens", body) for body in bodies))
        assert len(server.core.requests) == num_requests == len(bodies)  # nothing was run
        for one, other in zip(made, counted, strict=True):
            assert other.json() == {
                "object": "response.input_tokens",
                "input_tokens": one.json()["usage"]["input_tokens"],
            }
        assert counted[1].headers["x-mvllm-unknown-fields"] == "tools.web_search"
        one, more, on = server.exchange(
            ("POST", RESPONSES, bodies[0]),
            ("POST", f"{RESPONSES}/input_tokens", {"input": "And?", "previous_response_id": "{id}"}),
            ("POST", RESPONSES, {"input": "And?", "previous_response_id": "{id}"}),
        )
        counts = more.json()["input_tokens"], on.json()["usage"]["input_tokens"]
        assert counts[0] == counts[1] > one.json()["usage"]["input_tokens"]
        missing, unknown, too_long = server.exchange(
            ("POST", f"{RESPONSES}/input_tokens", {}),
            ("POST", f"{RESPONSES}/input_tokens", {"input": "x", "model": "y"}),
            ("POST", f"{RESPONSES}/input_tokens", {"input": "word " * 400}),
        )
        assert (missing.status_code, unknown.status_code) == (400, 404)
        assert too_long.json()["input_tokens"] > 400  # this is what a client wants to know

    def test_an_empty_input_continues_what_is_there(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        first, on, instructed, nothing = server.exchange(
            ("POST", RESPONSES, {"input": "Hello."}),
            ("POST", RESPONSES, {"input": [], "previous_response_id": "{id}"}),
            ("POST", RESPONSES, {"input": [], "instructions": "Greet me."}),
            ("POST", RESPONSES, {"input": []}),
        )
        assert [each.status_code for each in (first, on, instructed, nothing)] == [200, 200, 200, 400]
        assert "assistant: Hello you." in server.core.prompts[1] and server.core.prompts[2] == "system: Greet me."

    def test_compacting_is_not_offered(self, folder: str) -> None:
        answer = Server(folder, "x").post({"input": "x"}, f"{RESPONSES}/compact")
        assert answer.status_code == 404 and "truncation='auto'" in answer.json()["error"]["message"]
