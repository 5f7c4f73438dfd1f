"""JSON in `<tool_call>` tags: valid, malformed and partial calls."""

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


FORMS = [wrap_hermes, wrap_hermes_list]
plain_texts = st.text(st.sampled_from("ab é.\n!"), max_size=12)


@pytest.mark.parametrize("wrap", FORMS)
@settings(max_examples=20)
@given(
    written=st.lists(calls, min_size=1, max_size=3),
    before=plain_texts.map(lambda text: text + "\n" if text.strip() else text),
    after=plain_texts.map(lambda text: "\n" + text if text else text),
    at=cuts,
)
def test_calls_are_found_unchanged(wrap, written, before, after, at):
    """Arguments are the model's JSON text, unchanged; content is the text around the calls."""
    text = before + wrap(written) + after
    parsed = streamed(make_parser("hermes"), cut(text, at))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [(w.name, w.arguments) for w in written]
    assert "".join(parsed.content.split()) == "".join((before + after).split())
    assert parsed.content == parsed.content.rstrip()


def test_a_call_starts_with_its_arguments_which_are_streamed():
    text = wrap_hermes([Written("get_weather", '{"city": "Paris"}')])
    deltas = stream_deltas(make_parser("hermes"), [text[:-20], *text[-20:]])
    head, *pieces = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert (head.index, head.name) == (0, "get_weather") and head.id
    assert head.as_json() == {
        "tool_calls": [
            {"index": 0, "id": head.id, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        ]
    }
    assert len(pieces) > 2 and json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Paris"}
    assert pieces[-1].as_json() == {"tool_calls": [{"index": 0, "function": {"arguments": pieces[-1].arguments}}]}


def test_ids_are_unique():
    found = make_parser("hermes").parse(wrap_hermes([Written("f", "{}")] * 200)).tool_calls
    assert len({call.id for call in found}) == 200
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call.id) for call in found)


def test_content_is_emitted_at_once_except_partial_markers_and_trailing_space():
    stream = make_parser("hermes").stream()
    assert stream.feed("Hello") == [ContentDelta("Hello")]
    assert stream.feed(" world \n") == [ContentDelta(" world")]
    assert stream.feed("a <") == [ContentDelta(" \na")]
    assert stream.feed("b>") == [ContentDelta(" <b>")]
    assert stream.feed("\n<tool_cal") == []
    assert stream.finish() == [ContentDelta("\n<tool_cal")]


F = ("f", '{"a": 1}')
CASES = [
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
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "found"), CASES)
def test_cases(text, content, found):
    parser = make_parser("hermes")
    assert without_ids(parser.parse(text)) == without_ids(streamed(parser, text)) == (content, found, None)
