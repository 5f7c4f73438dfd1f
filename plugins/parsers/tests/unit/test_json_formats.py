"""JSON formats of Llama and Mistral: valid, malformed and partial calls, and any text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.interface import ToolCallDelta
from tests.unit.entrypoints.parsers.parser_helpers import (
    Written,
    assert_split_is_irrelevant,
    assert_text_without_calls_is_content,
    assert_time_is_linear,
    calls,
    cut,
    cuts,
    make_parser,
    messy_text,
    prompts,
    stream_deltas,
    streamed,
    without_ids,
)
from tests.unit.entrypoints.parsers.test_streaming import ADVERSARIAL
from tests.unit.entrypoints.parsers.test_tool_formats import F, plain_texts


def wrap_llama(written):
    return "; ".join(call.as_object("parameters") for call in written)


def wrap_llama_tag(written):
    return "".join(f"<|python_tag|>{call.as_object('parameters', name_last=True)}" for call in written)


def wrap_mistral_list(written):
    return f"[TOOL_CALLS] [{', '.join(call.as_object() for call in written)}]"


def wrap_mistral_names(written):
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in written)


def wrap_mistral_ids(written):
    return "".join(f"[TOOL_CALLS]{call.name}[CALL_ID]abc123DEF[ARGS] {call.arguments}\n" for call in written)


FORMS = [
    ("llama3_json", wrap_llama),
    ("llama3_json", wrap_llama_tag),
    ("mistral", wrap_mistral_list),
    ("mistral", wrap_mistral_names),
    ("mistral", wrap_mistral_ids),
]


@pytest.mark.parametrize(("name", "wrap"), FORMS, ids=[f"{name}-{wrap.__name__}" for name, wrap in FORMS])
@settings(max_examples=20)
@given(
    written=st.lists(calls, min_size=1, max_size=3),
    before=plain_texts.map(lambda text: text + "\n" if text.strip() else text),
    after=plain_texts.map(lambda text: "\n" + text if text else text),
    at=cuts,
)
def test_calls_are_found_unchanged(name, wrap, written, before, after, at):
    """Arguments are the model's JSON text, unchanged; content is the text around the calls."""
    text = before + wrap(written) + after
    parsed = streamed(make_parser(name), cut(text, at))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [(w.name, w.arguments) for w in written]
    assert "".join(parsed.content.split()) == "".join((before + after).split())
    assert parsed.content == parsed.content.rstrip()


@pytest.mark.parametrize(("name", "wrap"), [FORMS[0], FORMS[3]])
def test_a_call_starts_with_its_arguments_which_are_streamed(name, wrap):
    text = wrap([Written("get_weather", '{"city": "Paris"}')])
    deltas = stream_deltas(make_parser(name), [text[:-20], *text[-20:]])
    head, *pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert (head.index, head.name) == (0, "get_weather") and head.id
    assert len(pieces) > 2 and json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Paris"}


def test_mistrals_ids_are_nine_letters_and_digits():
    ids = {call.id for call in make_parser("mistral").parse("[TOOL_CALLS]f[ARGS]{}" * 200).tool_calls}
    assert len(ids) == 200 and all(len(one) == 9 and one.isalnum() for one in ids)


CASES = {
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('\n\n {"name": "f", "parameters": {"a": 1}}\n', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F]),
        ('[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, ("g", "{}")]),
        ('{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}', "", [F, ("g", "{}")]),
        ('I will look:\n{"name": "f", "parameters": {"a": 1}}\nDone.', "I will look:\n\nDone.", [F]),
        # JSON as content, and text with braces.
        ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ('{"name": "Ada"}', '{"name": "Ada"}', []),
        ('{"people": {"name": "f", "parameters": {}}}', '{"people": {"name": "f", "parameters": {}}}', []),
        ('Use {"name": "f", "parameters": {}} here', 'Use {"name": "f", "parameters": {}} here', []),
        ("[1] Paris; {x}", "[1] Paris; {x}", []),
        ("<|python_tag|>print(1)", "print(1)", []),
        ('{"name": "f", "par', '{"name": "f", "par', []),
        ('{"name": "f", "parameters": {"a": ', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {"a": 1}}; and so on', "; and so on", [F]),
        ('{"name": "f", "parameters": {"a": 1}} ; and so on', " ; and so on", [F]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123DEF"}, {"name": "g"}]', "", [F, ("g", "{}")]),
        ('[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [F]),
        ('Sure. [TOOL_CALLS]f[ARGS]{"a": 1}', "Sure.", [F]),
        ('[TOOL_CALLS]f{"a": 1}', "", [F]),
        ('[TOOL_CALLS]f [ARGS] {"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}', "", [F, ("g", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', "", [("f", '{"a": "[TOOL_CALLS]"}')]),
        ("[TOOL_CALLS]f[ARGS]{'a': None}", "", [("f", '{"a": null}')]),
        ("[TOOL_CALLS]f[ARGS]", "", []),
        ("[TOOL_CALLS]hello world", "hello world", []),
        ("[TOOL_CALLS][", "", []),
        ("[TOOL_CALLS]f[ARGS]{", "", [("f", "{}")]),
        ('[TOOL_CALLS][TOOL_CALLS] [TOOL_CALLS]f[ARGS]{"a": 1}', "", [F]),
        ('[TOOL_CALLS]f[ARGS]hm [TOOL_CALLS]f[ARGS]{"a": 1}', "fhm", [F]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, 5] x', ", 5] x", [F]),
        ("a [1] b", "a [1] b", []),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "content", "found"), [(n, *case) for n, cases in CASES.items() for case in cases]
)
def test_cases(name, text, content, found):
    parser = make_parser(name)
    assert without_ids(parser.parse(text)) == without_ids(streamed(parser, text)) == (content, found, None)


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("llama3_json", None), ("mistral", None), ("llama3_json", "deepseek_r1")]
)
@settings(max_examples=15)
@given(text=messy_text, at=cuts, prompt=prompts)
def test_the_output_does_not_depend_on_the_split(tools, reasoning, text, at, prompt):
    assert_split_is_irrelevant(make_parser(tools, reasoning), text, at, prompt)


@pytest.mark.parametrize("tools", ["llama3_json", "mistral"])
@settings(max_examples=25)
@given(text=messy_text)
def test_text_without_calls_is_content(tools, text):
    assert_text_without_calls_is_content(make_parser(tools), text)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tools", "open_call"),
    [("llama3_json", '{"name": "f", "parameters": {"a": "'), ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "')],
)
@pytest.mark.parametrize("unit", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_long_texts_take_linear_time(tools, open_call, unit):
    assert_time_is_linear(make_parser(tools, "deepseek_r1" if tools == "llama3_json" else None), unit, open_call)
