"""The JSON scanner: valid JSON is unchanged, Python literals become JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.json_stream import JsonValueReader, unquote
from tests.unit.entrypoints.parsers.parser_helpers import cut, cuts, json_values, layouts


def read(pieces):
    """The emitted text and the remaining text."""
    value, out = JsonValueReader(), []
    rest = ""
    for piece in pieces:
        end = value.feed(piece, 0, out) if not (value.done or value.failed) else 0
        rest += piece[end:]
    value.finish(out)
    return "".join(out), rest


@given(value=json_values, layout=layouts, after=st.sampled_from([",", "}", "\n", " x", "<"]), at=cuts)
def test_valid_json_is_emitted_unchanged_up_to_its_end(value, layout, after, at):
    text = json.dumps(value, **layout)
    assert read([text + after]) == (text, after)
    assert read(cut(text + after, at)) == (text, after)


printable = st.text(st.characters(max_codepoint=0x17F, exclude_characters="\x7f"), max_size=8)
python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | printable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(printable, inner, max_size=3),
    max_leaves=6,
)


@given(value=python_values, at=cuts)
def test_python_literals_become_json(value, at):
    text, rest = read(cut(repr(value) + ",", at))
    assert (json.loads(text), rest) == (value, ",")


@pytest.mark.parametrize(
    ("written", "passed_on"),
    [
        ('{"a": "two\nlines\tand a tab"}', '{"a": "two\\nlines\\tand a tab"}'),
        ("{'a': 'say \"no\"', 'b': 'it\\'s'}", '{"a": "say \\"no\\"", "b": "it\'s"}'),
        ('{"a": "it\\\'s"}', '{"a": "it\'s"}'),
        ('["None", NoneX, xNone, None, Truest, True]', '["None", NoneX, xNone, null, Truest, true]'),
        ('{"a": __import__("os").system("x")}', '{"a": __import__("os").system("x")}'),
        ("[1,}", "[1,}"),
    ],
)  # fmt: skip
def test_examples(written, passed_on):
    assert read([written])[0] == read(written)[0] == passed_on


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": "b\\', '{"a": Tr', "nul", '"x', "{'a': 'b"])
def test_incomplete_values_are_emitted(text):
    assert read([text])[0] == read(text)[0] == text.replace("'", '"')


@pytest.mark.parametrize(
    ("text", "value"), [('"a\\u00e9\\n"', "aé\n"), ('"\\ud800"', "\\ud800"), ('"\\q"', "\\q"), ('""', "")]
)
def test_an_invalid_string_is_returned_unchanged(text, value):
    assert unquote(text) == value
