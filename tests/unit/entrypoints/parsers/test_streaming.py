"""Properties of all parsers: independence of the split, no lost text, no exceptions, linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.interface import ContentDelta, ReasoningDelta, merge_deltas
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from tests.unit.entrypoints.parsers.parser_helpers import (
    REASONING,
    TOOLS,
    cut,
    cuts,
    make_parser,
    messy_text,
    stream_deltas,
    streamed,
    without_ids,
    without_tags,
)

PAIRS = [*((tools, None) for tools in TOOLS), *((None, reasoning) for reasoning in REASONING)]
PAIRS += [("hermes", "qwen3"), ("llama3_json", "deepseek_r1")]
prompts = st.sampled_from([None, "assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"])


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
@settings(max_examples=15)
@given(text=messy_text, at=cuts, prompt=prompts)
def test_the_output_does_not_depend_on_the_split(tools, reasoning, text, at, prompt):
    parser = make_parser(tools, reasoning)
    whole = without_ids(parser.parse(text, prompt))
    assert without_ids(streamed(parser, cut(text, at), prompt)) == whole
    deltas = stream_deltas(parser, list(text), prompt)
    assert without_ids(merge_deltas(deltas)) == whole
    # The content is a subsequence of the text: nothing is emitted twice or retracted.
    i = 0
    for delta in deltas:
        if isinstance(delta, ContentDelta | ReasoningDelta):
            for c in delta.text:
                i = text.index(c, i) + 1


@pytest.mark.parametrize("tools", TOOLS)
@settings(max_examples=25)
@given(text=messy_text)
@example(
    "<tool_call>{'arguments': \"{}\", 'name': <tool_call>{'arguments': \"{}\", 'name': [TOOL_CALLS]f[ARGS]{\"a\": 1}"
)
@example('<tool_call>{"name": "f", <tool_call></tool_call> x')
@example('<tool_call>[<tool_call>"f"[[ARGS]')
def test_text_without_calls_is_content(tools, text):
    parser = make_parser(tools)
    parsed = parser.parse(text)
    if not parsed.tool_calls:
        content, all_text = without_tags(parser, parsed.content), without_tags(parser, text)
        assert all_text.startswith(content)  # a call at the end may be cut off
        assert content == all_text or any(marker in text for marker in parser.markers)


@pytest.mark.parametrize("tools", TOOLS)
@settings(max_examples=25)
@given(text=messy_text.map(lambda text: "".join(c for c in text if c not in '{}"')))
def test_text_that_cannot_contain_a_call_is_content_unchanged(tools, text):
    parser = make_parser(tools)
    parsed = parser.parse(text)
    assert not parsed.tool_calls
    if not any(marker in text for marker in parser.markers):
        assert parsed.content == text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
@settings(max_examples=25)
@given(text=messy_text, at=cuts)
def test_parsers_of_constrained_output_accept_any_text(choice, text, at):
    choice = parse_tool_choice([{"type": "function", "function": {"name": "f"}}], choice)

    def read(pieces):
        stream = choice.stream()
        return without_ids(merge_deltas([d for piece in pieces for d in stream.feed(piece)] + stream.finish()))

    assert read(cut(text, at)) == read([text]) == read(list(text))


LENGTH = 120_000
"""Characters of a long text."""
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


@pytest.mark.parametrize(
    "pair",
    [
        ("hermes", "qwen3"),
        pytest.param(("llama3_json", "deepseek_r1"), marks=pytest.mark.exhaustive),
        pytest.param(("mistral", None), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.parametrize("unit", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_long_texts_take_linear_time(pair, unit):
    """A quadratic step would take minutes to hours."""
    parser = make_parser(*pair)
    open_call = {"hermes": '<tool_call>{"name": "f", "arguments": {"a": "', "mistral": '[TOOL_CALLS]f[ARGS]{"a": "'}
    long = unit * (LENGTH // len(unit))
    for text in (long, open_call.get(pair[0], '{"name": "f", "parameters": {"a": "') + long):
        assert without_ids(streamed(parser, text[:10_000])) == without_ids(parser.parse(text[:10_000]))
        parser.parse(text)


def test_a_long_text_in_single_characters():
    text = '<think>a</think>\n<tool_call>[{"name": "f", "arguments": {"code": "'
    text += '\\"<tool_call>[TOOL_CALLS]{\\\\' * 4_000 + '"}}]</tool_call>'
    parsed = streamed(make_parser("hermes", "qwen3"), text)
    [call] = parsed.tool_calls
    assert len(text) > 110_000 and len(json.loads(call.arguments)["code"]) == 4_000 * 26
    assert (parsed.reasoning, parsed.content, call.name) == ("a", "", "f")
