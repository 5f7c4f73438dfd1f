"""Calls and thoughts are found in what a model writes, however it is cut into pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.entrypoints.openai.parsers.answer import AnswerParser
from mvllm.entrypoints.openai.parsers.interface import Parser, Part, Reasoning, Text, ToolCall
from mvllm.entrypoints.openai.parsers.reasoning import make_deepseek_r1, make_qwen3
from mvllm.entrypoints.openai.parsers.tools import HermesParser, Llama3JsonParser, MistralParser

MAKERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3": lambda: make_qwen3("Hello"),
    "deepseek_r1": lambda: make_deepseek_r1("Hello"),
}
PARIS = ToolCall("weather", '{"city": "Paris"}')
ROME = ToolCall("weather", '{"city": "Rome"}')


def parse(make: Callable[[], Parser], *pieces: str) -> list[Part]:
    """All parts, neighbours of one kind joined."""
    parser = make()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    joined: list[Part] = []
    for part in parts:
        if joined and type(joined[-1]) is type(part) and not isinstance(part, ToolCall):
            part = type(part)(joined.pop().text + part.text)  # type: ignore[union-attr, call-arg]
        joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("name", "written", "parts"),
    [
        ("hermes", "Just text < and <tool_ even", [Text("Just text < and <tool_ even")]),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
        (
            "hermes",
            'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>\n',
            [Text("Let me see."), PARIS, ROME, Text("\n")],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [ToolCall("f", "{}")]),
        ("hermes", "<tool_call>nonsense</tool_call>!", [Text("<tool_call>nonsense</tool_call>!")]),
        ("hermes", '<tool_call>{"name": "f", "arg', [Text('<tool_call>{"name": "f", "arg')]),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', [Text('<tool_call>{"name": 5}</tool_call>')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>',
         [Text('<tool_call>{"name": "f", "arguments": []}</tool_call>')]),
        ("llama3_json", "Hello {", [Text("Hello {")]),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ("llama3_json", ' <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; '
         '{"name": "weather", "arguments": {"city": "Rome"}}', [PARIS, ROME]),
        ("llama3_json", '{"city": "Paris"}', [Text('{"city": "Paris"}')]),
        ("llama3_json", "{ not JSON", [Text("{ not JSON")]),
        ("mistral", "Hello [TOOL", [Text("Hello [TOOL")]),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
         '{"name": "weather", "arguments": {"city": "Rome"}}]', [PARIS, ROME]),
        ("mistral", 'So: [TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
         [Text("So: "), PARIS, ROME]),
        ("mistral", "[TOOL_CALLS]nonsense", [Text("[TOOL_CALLS]nonsense")]),
        ("qwen3", "No thoughts", [Text("No thoughts")]),
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("\nHm.\n"), Text("Yes.")]),
        ("qwen3", "<thin", [Text("<thin")]),
        ("qwen3", "<think>cut off </thi", [Reasoning("cut off </thi")]),
        ("deepseek_r1", "Hm.</think>Yes. </think>", [Reasoning("Hm."), Text("Yes. </think>")]),
        ("deepseek_r1", "<think>Hm.</think>", [Reasoning("Hm.")]),
    ],
)  # fmt: skip
def test_what_is_found(name: str, written: str, parts: list[Part]) -> None:
    assert parse(MAKERS[name], written) == parts
    assert parse(MAKERS[name], *written) == parts  # letter by letter


def test_prompts_open_and_close_thoughts() -> None:
    assert parse(lambda: make_qwen3("...<think>\n"), "Hm.</think>Yes.") == [Reasoning("Hm."), Text("Yes.")]
    closed = "...<think>\n\n</think>\n\n"
    assert (
        parse(lambda: make_deepseek_r1(closed), "Yes.") == parse(lambda: make_qwen3(closed), "Yes.") == [Text("Yes.")]
    )


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>", "\n", " ",
         '{"name": "f", "arguments": {"x": [1, "}"]}}', '{"name":', "{", "}", ";", "[", "]", "<", "f", "é"]  # fmt: skip


@given(st.sampled_from(sorted(MAKERS)), st.lists(st.sampled_from(MARKS), max_size=12), st.data())
def test_cuts_change_nothing(name: str, tokens: list[str], data: st.DataObject) -> None:
    written = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert parse(MAKERS[name], *pieces) == parse(MAKERS[name], written)


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", "[TOOL_CALLS]", "{", "[", '{"a":', "<", "</think", "\n"]
)
def test_a_megabyte_made_to_hurt_is_done_at_once(name: str, unit: str) -> None:
    parser, start = MAKERS[name](), time.process_time()
    for _ in range(1000):
        parser.feed(unit * (1_000_000 // len(unit) // 1000))
    parser.finish()
    assert time.process_time() - start < 20  # a quadratic one takes minutes


def test_arguments_are_data_and_never_run() -> None:
    code = '__import__("os").system("false")'
    [call] = parse(HermesParser, f"<tool_call>{json.dumps({'name': code, 'arguments': {'x': code}})}</tool_call>")
    assert isinstance(call, ToolCall) and call.name == code and json.loads(call.arguments) == {"x": code}


class TestAnswers:
    def test_a_message_has_thoughts_text_and_calls(self) -> None:
        parser = AnswerParser(make_qwen3(""), HermesParser())
        written = '<think>Hm.</think>Look:<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
        message = parser.message(written)
        assert message["reasoning"] == message["reasoning_content"] == "Hm." and message["content"] == "Look:"
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"x": 1}'} and call["id"].startswith("call_")
        assert parser.finish_reason("stop") == "tool_calls" and parser.finish_reason("length") == "length"

    def test_a_call_in_thoughts_is_none(self) -> None:
        parser = AnswerParser(make_qwen3(""), HermesParser())
        assert parser.message('<think><tool_call>{"name": "f"}</tool_call></think>No.')["content"] == "No."
        assert parser.num_calls == 0 and parser.finish_reason("stop") == "stop"

    def test_thoughts_can_be_left_out_and_calls_be_one(self) -> None:
        parser = AnswerParser(make_qwen3(""), HermesParser(), show_reasoning=False, one_call=True)
        message = parser.message("<think>Hm.</think>" + '<tool_call>{"name": "f"}</tool_call>' * 3)
        assert "reasoning" not in message and len(message["tool_calls"]) == 1 and message["content"] is None
