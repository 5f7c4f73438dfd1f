"""Tool call formats: valid, malformed and partial calls."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.interface import ContentDelta, ToolCallDelta
from tests.unit.entrypoints.parsers.parser_helpers import (
    Written,
    calls,
    cut,
    cuts,
    make_parser,
    stream_deltas,
    streamed,
    without_ids,
)


def wrap_hermes(written):
    return "\n".join(f"<tool_call>\n{call.as_object()}\n</tool_call>" for call in written)


def wrap_hermes_list(written):
    return f"<tool_call>[{', '.join(call.as_object(name_last=True) for call in written)}]</tool_call>"


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
    ("hermes", wrap_hermes),
    ("hermes", wrap_hermes_list),
    ("llama3_json", wrap_llama),
    ("llama3_json", wrap_llama_tag),
    ("mistral", wrap_mistral_list),
    ("mistral", wrap_mistral_names),
    ("mistral", wrap_mistral_ids),
]
plain_texts = st.text(st.sampled_from("ab é.\n!"), max_size=12)


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


@pytest.mark.parametrize(("name", "wrap"), FORMS[:1] + FORMS[2:3] + FORMS[5:6])
def test_a_call_starts_with_its_arguments_which_are_streamed(name, wrap):
    text = wrap([Written("get_weather", '{"city": "Paris"}')])
    deltas = stream_deltas(make_parser(name), [text[:-20], *text[-20:]])
    head, *pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert (head.index, head.name) == (0, "get_weather") and head.id
    assert head.as_json() == {
        "tool_calls": [
            {"index": 0, "id": head.id, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        ]
    }
    assert len(pieces) > 2 and json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Paris"}
    assert pieces[-1].as_json() == {"tool_calls": [{"index": 0, "function": {"arguments": pieces[-1].arguments}}]}


@pytest.mark.parametrize(("name", "looks"), [("hermes", r"call_[0-9a-f]{24}"), ("llama3_json", r"call_[0-9a-f]{24}")])
def test_ids_are_unique(name, looks):
    wrap = wrap_hermes if name == "hermes" else wrap_llama
    found = make_parser(name).parse(wrap([Written("f", "{}")] * 200)).tool_calls
    assert len({call.id for call in found}) == 200 and all(re.fullmatch(looks, call.id) for call in found)


def test_mistrals_ids_are_nine_letters_and_digits():
    ids = {call.id for call in make_parser("mistral").parse("[TOOL_CALLS]f[ARGS]{}" * 200).tool_calls}
    assert len(ids) == 200 and all(len(one) == 9 and one.isalnum() for one in ids)


def test_content_is_emitted_at_once_except_partial_markers_and_trailing_space():
    stream = make_parser("hermes").stream()
    assert stream.feed("Hello") == [ContentDelta("Hello")]
    assert stream.feed(" world \n") == [ContentDelta(" world")]
    assert stream.feed("a <") == [ContentDelta(" \na")]
    assert stream.feed("b>") == [ContentDelta(" <b>")]
    assert stream.feed("\n<tool_cal") == []
    assert stream.finish() == [ContentDelta("\n<tool_cal")]


F = ("f", '{"a": 1}')
CASES = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
        # Text around calls is content; white space between calls is dropped.
        ('A\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n\nB\n', "A\n\n\nB", [F]),
        # Keys in another order, additional keys, and repeated keys.
        ('<tool_call>{"id": [1, {"name": "x"}], "arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "arguments": {}}</tool_call>', "", [F]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [F]),
        # No arguments.
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": None}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
        # An object in a string; another string; a number.
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
        *(
            (text := f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>', text, [])
            for value in ('"a"', "5", "[1]", "true")
        ),
        (text := '<tool_call>{"arguments": 5, "name": "f"}</tool_call>', text, []),
        # Python literals.
        ("<tool_call>{'name': 'f', 'arguments': {'a': None}}</tool_call>", "", [("f", '{"a": null}')]),
        # The end marker is missing, is part of a string, or has no call.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}', "", [F, ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}</tool_call>', "", [F, ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", [("f", '{"a": "</tool_call>"}')]),
        ("a </tool_call> b", "a </tool_call> b", []),
        # Incomplete: nothing if it is no call yet, else the arguments so far.
        ('<tool_call>\n{"name": "f"', "", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ', "", [("f", "{}")]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x"}')]),
        ('<tool_call>\n{"name": "f", "arguments": "{\\"a', "", []),
        # Malformed: the same, and the following text is parsed.
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ("<tool_call></tool_call>", "", []),
        ("A <tool_call>[]</tool_call> B", "A  B", []),
        ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"a" <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
        ('<tool_call>{"a" <tool_call>{"b" <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>x', "x", [F]),
        # Two tags, and no call: all of it is content.
        (text := '<tool_call>{"a" <tool_call>{"b" x', text, []),
        ('<tool_call>{"a" <tool_call></tool_call> x', '<tool_call>{"a"  x', []),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>B', "B", [("f", '{"a": [1]}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call>', "oops}", [F]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "}", [F]),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "", [("\\ud800", "{}")]),
        ('<tool_call>[{"name": "f", "arguments": {"a": 1} x<tool_call>[{"name": "g"}]', "x", [F, ("g", "{}")]),
    ],
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
