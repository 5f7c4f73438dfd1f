"""Properties of all parsers: independence of the split, no lost text, no exceptions, linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings

from mvllm.entrypoints.parsers.interface import merge_deltas
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from tests.unit.entrypoints.parsers.parser_helpers import (
    assert_split_is_irrelevant,
    assert_text_without_calls_is_content,
    assert_time_is_linear,
    cut,
    cuts,
    make_parser,
    messy_text,
    prompts,
    streamed,
    without_ids,
)

PAIRS = [("hermes", None), (None, "qwen3"), (None, "deepseek_r1"), ("hermes", "qwen3")]


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
@settings(max_examples=15)
@given(text=messy_text, at=cuts, prompt=prompts)
def test_the_output_does_not_depend_on_the_split(tools, reasoning, text, at, prompt):
    assert_split_is_irrelevant(make_parser(tools, reasoning), text, at, prompt)


@settings(max_examples=25)
@given(text=messy_text)
@example(
    "<tool_call>{'arguments': \"{}\", 'name': <tool_call>{'arguments': \"{}\", 'name': [TOOL_CALLS]f[ARGS]{\"a\": 1}"
)
@example('<tool_call>{"name": "f", <tool_call></tool_call> x')
@example('<tool_call>[<tool_call>"f"[[ARGS]')
def test_text_without_calls_is_content(text):
    assert_text_without_calls_is_content(make_parser("hermes"), text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
@settings(max_examples=25)
@given(text=messy_text, at=cuts)
def test_parsers_of_constrained_output_accept_any_text(choice, text, at):
    choice = parse_tool_choice([{"type": "function", "function": {"name": "f"}}], choice)

    def read(pieces):
        stream = choice.stream()
        return without_ids(merge_deltas([d for piece in pieces for d in stream.feed(piece)] + stream.finish()))

    assert read(cut(text, at)) == read([text]) == read(list(text))


ADVERSARIAL = {
    "start tags": "<tool_call>",
    "opened calls": '<tool_call>{"name": "f", ',
    "calls in strings": '<tool_call>{"a": "',
    "calls that nearly are": '<tool_call>{"name": "f", "arguments"',
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "end tags": "</tool_call>",
    "tags that nearly are": "<tool_cal" + "l" * 3 + "<",
    "brackets": "[TOOL_CALLS][{",
    "names": "[TOOL_CALLS]f[ARGS]",
    "ids": "[TOOL_CALLS]f[CALL_ID]",
    "name of one letter": "[TOOL_CALLS]f",
    "lines": "\n{",
    "objects": '\n{"name": "f", "parameters": {}}',
    "separators": '{"name": "f", "parameters": {}};',
    "python tags": '<|python_tag|>{"name": ',
    "depth": '{"name": "f", "parameters": ' + "[" * 40,
    "white space": "\n \t ",
    "thoughts": "<think></think>",
    "thoughts that nearly end": "<think> </thin",
    "quotes": "'\"\\",
    "numbers": "1234567890",
}


@pytest.mark.parametrize("unit", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_long_texts_take_linear_time(unit):
    open_call = '<tool_call>{"name": "f", "arguments": {"a": "'
    assert_time_is_linear(make_parser("hermes", "qwen3"), unit, open_call)


def test_a_long_text_in_single_characters():
    text = '<think>a</think>\n<tool_call>[{"name": "f", "arguments": {"code": "'
    text += '\\"<tool_call>[TOOL_CALLS]{\\\\' * 4_000 + '"}}]</tool_call>'
    parsed = streamed(make_parser("hermes", "qwen3"), text)
    [call] = parsed.tool_calls
    assert len(text) > 110_000 and len(json.loads(call.arguments)["code"]) == 4_000 * 26
    assert (parsed.reasoning, parsed.content, call.name) == ("a", "", "f")
