"""Tools and reasoning over HTTP: the whole application with an engine core that generates a given text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.chat_prompt_renderer import MAX_TOOLS
from mvllm.messages.requests import FinishReason
from mvllm.structured_output.additional_properties import STRICT_KEY
from tests.unit.entrypoints import scripted_server
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
WRITTEN = '<think>Hm.</think>Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK = {"messages": [{"role": "user", "content": "What is the weather?"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


class Server(scripted_server.Server):
    def __init__(self, folder: str, text: str = WRITTEN, reason: FinishReason = FinishReason.STOP, **parsers: Any):
        super().__init__(folder, text, reason, **parsers)

    def message(self, **more: Any) -> tuple[dict[str, Any], str]:
        [choice] = self.post({**ASK, **more}).json()["choices"]
        return choice["message"], choice["finish_reason"]


def test_a_response_has_reasoning_content_and_tool_calls(folder: str) -> None:
    server = Server(folder)
    message, reason = server.message()
    assert reason == "tool_calls"
    assert message["content"] == "Let me see." and message["reasoning"] == "Hm." == message["reasoning_content"]
    [call] = message["tool_calls"]
    assert call["type"] == "function" and call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "weather" in server.core.prompts[0]


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stream_has_the_same_reasoning_content_and_tool_calls(folder: str, reason: FinishReason) -> None:
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


def arguments_of_the_call(server: Server) -> list[str]:
    """The arguments of the one call, as JSON text: whole and streamed."""

    def events(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        text = server.post({**body, "stream": True}, path).text
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    [call] = server.message()[0]["tool_calls"]
    found = [call["function"]["arguments"]]
    deltas = [event["choices"][0]["delta"] for event in events("/v1/chat/completions", ASK)]
    found.append("".join(one["function"]["arguments"] for delta in deltas for one in delta.get("tool_calls", ())))
    return found


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "re": "\\d", ', {"re": "\\d"}),
        pytest.param(
            *("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"', {}),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_arguments_of_a_call_without_an_end_are_json_unless_it_was_cut_off(
    folder: str, parser: str, text: str, arguments: dict[str, Any]
) -> None:
    check_call_without_end(folder, parser, text, arguments)


def check_call_without_end(folder: str, parser: str, text: str, arguments: dict[str, Any]) -> None:
    """As in other servers, a client sees from invalid JSON and the finish reason that arguments are incomplete."""
    found = arguments_of_the_call(Server(folder, text, tool_parser=parser))
    assert len(found) == 2 and all(json.loads(one) == {"city": "Paris", **arguments} for one in found)
    server = Server(folder, text, FinishReason.LENGTH, tool_parser=parser)
    cut = arguments_of_the_call(server)
    assert len(cut) == 2 and len(set(cut)) == 1 and cut[0].startswith('{"city": "Paris"')
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut[0])
    assert server.message()[1] == "length"


def test_a_strict_function_constrains_calls_and_nothing_else(folder: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}]
    server = Server(folder)
    message, reason = server.message(tools=tools)
    assert reason == "tool_calls" and message["content"] == "Let me see." and message["reasoning"] == "Hm."
    constraint = server.core.requests[0].sampling_params.structured_outputs
    tag = json.loads(constraint.structural_tag)
    assert tag["structures"][0]["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
    assert tag["structures"][0]["schema"] == {**parameters, "additionalProperties": False, STRICT_KEY: True}
    assert (constraint.thoughts_start, constraint.thoughts_end) == ("<think>", "</think>")
    server.message()  # without a strict function
    assert server.core.requests[1].sampling_params.structured_outputs is None
    format_ = {"type": "json_object"}
    refused = server.post({**ASK, "tools": tools, "response_format": format_})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"


def test_without_tools_or_with_tool_choice_none_calls_are_text(folder: str) -> None:
    for more in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message, reason = Server(folder).message(**more)
        assert "<tool_call>" in message["content"] and "tool_calls" not in message and reason == "stop"
    message, _ = Server(folder, reasoning_parser=None, tool_parser=None).message(tools=None)
    assert message["content"] == WRITTEN


def test_unsupported_tool_requests_are_rejected(folder: str) -> None:
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
    message = Server(folder, tool_parser=None).post(ASK).json()["error"]["message"]
    assert "--tool-call-parser" in message and "hermes" in message


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
def test_a_required_call_is_read_from_its_json(
    folder: str, choice: object, written: str, ended: str, reason: FinishReason
) -> None:
    """Without a parser for the model family's format, and with a reasoning parser, whose text comes before the call."""
    for parsers, before in (({"tool_parser": None}, ""), ({"reasoning_parser": "deepseek_r1"}, "Hm.</think>\n\n")):
        server = Server(folder, before + written, reason, **parsers)
        message, why = server.message(tool_choice=choice)
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert message["content"] is None and message.get("reasoning") == ("Hm." if before else None)
        assert why == (ended if reason is FinishReason.STOP else "length")
        lines = server.post({**ASK, "tool_choice": choice, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        pieces = [piece for chunk in chunks for piece in chunk["delta"].get("tool_calls", ())]
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Paris"}'
        assert not any(chunk["delta"].get("content") for chunk in chunks) and chunks[-1]["finish_reason"] == why


def test_too_many_messages_or_tools_are_rejected_before_they_are_processed(folder: str) -> None:
    """For example more messages and calls than the model's context of 256 tokens."""
    message = {"role": "user", "content": "x"}
    for more, param in (
        ({"messages": [{}] * 257}, "messages"),
        ({"messages": [message, {"role": "assistant", "tool_calls": [{}] * 255}]}, "messages"),
        ({"tools": [{}] * (MAX_TOOLS + 1)}, "tools"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(257)))}, "chat_template_kwargs"),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = Server(folder, "x").post({"messages": [message], **more}, path)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param), error
            assert (error["code"] == "context_length_exceeded") == (param == "messages")


def test_earlier_calls_reach_the_template_as_objects(folder: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    server = Server(folder)
    server.message(messages=messages)
    assert "Rome" in server.core.prompts[0] and "sunny" in server.core.prompts[0]


def test_reasoning_can_be_left_out(folder: str) -> None:
    message, _ = Server(folder).message(include_reasoning=False, tools=None)
    assert "reasoning" not in message and "Hm." not in message["content"]


@pytest.mark.parametrize(
    ("parser", "template_end", "expected"),
    [
        ("qwen3", "", ("<think>", "</think>")),
        ("qwen3", "<think>\n", (None, "</think>")),
        ("qwen3", "<think>\n\n</think>\n\n", (None, None)),
        ("deepseek_r1", "", (None, "</think>")),
        ("thoughtless", "", (None, None)),
    ],
)
@pytest.mark.parametrize("wish", ["response_format", "tool_choice"])
def test_structured_output_applies_after_the_reasoning(
    tmp_path, parser: str, template_end: str, expected: tuple[str | None, str | None], wish: str
) -> None:
    form = {"response_format": {"type": "json_object"}, "tools": None} if wish == "response_format" else {}
    form = form or {"tool_choice": NAMED}
    written = '{"city": "Paris"}'
    thought = expected[1] is not None
    if thought:
        written = (expected[0] or "") + "Hm.</think>\n\n" + written
    folder = save_model_folder(tmp_path, TEMPLATE + template_end.replace("\n", "{{ '\\n' }}"))
    server = Server(folder, written, reasoning_parser=None if parser == "thoughtless" else parser)
    message, reason = server.message(**form)
    [sent] = server.core.requests
    wanted = sent.sampling_params.structured_outputs
    assert wanted is not None and (wanted.thoughts_start, wanted.thoughts_end) == expected
    assert reason == "stop" and message.get("reasoning") == ("Hm." if thought else None)
    answer = message["content"] if wish == "response_format" else message["tool_calls"][0]["function"]["arguments"]
    assert answer == '{"city": "Paris"}'
