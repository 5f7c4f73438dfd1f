"""The check of arguments: valid JSON is unchanged, and whatever a parser emits becomes the text of an object."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.entrypoints.parsers.checked_calls import ArgumentsChecker
from mvllm.entrypoints.parsers.interface import ContentDelta, ToolCallDelta, ToolParser, ToolStream
from mvllm.entrypoints.parsers.output_parser import OutputParser
from tests.unit.entrypoints.parsers.parser_helpers import arguments, cut, cuts, layouts


def checked(pieces, *, is_cut=False):
    checker = ArgumentsChecker()
    return "".join([*map(checker.feed, pieces), checker.finish(is_cut=is_cut)])


@given(value=arguments, layout=layouts, at=cuts)
def test_valid_json_is_unchanged(value, layout, at):
    text = json.dumps(value, **layout)
    assert checked(cut(text, at)) == checked([text]) == text


@given(value=arguments, layout=layouts, at=cuts, end=st.integers(0, 200))
def test_text_that_ends_early_is_closed_or_a_prefix(value, layout, at, end):
    text = json.dumps(value, **layout)
    part = text[: end % len(text)]
    assert isinstance(json.loads(checked(cut(part, at))), dict)
    assert text.startswith(checked(cut(part, at), is_cut=True))
    assert checked(part, is_cut=True).startswith("{")


@given(text=st.text("{}[]:,\"\\ \n01aeEutrnl-+.'", max_size=30), at=cuts)
def test_any_text_becomes_an_object(text, at):
    found = checked(cut(text, at))
    assert checked([text]) == found and isinstance(json.loads(found), dict)
    assert isinstance(json.loads(checked(["{" + text])), dict)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("", "{}"),
        ("5", "{}"),
        ('["a"]', "{}"),
        ('{"a": [1}}', '{"a": [1]}'),
        ('{"a": 1, "b"}', '{"a": 1}'),
        ('{"a": 1 "b": 2}', '{"a": 1 }'),
        ('{"a": , "b": 2}', "{}"),
        ('{"a": oops}', "{}"),
        ('{"a": 1, }', '{"a": 1}'),
        ('{"a": [1, 2, ], "b": 3}', '{"a": [1, 2], "b": 3}'),
        ('{"a": 1} and so on', '{"a": 1}'),
        ('{"a": "\\d \\x \\u12 \\\'"}', '{"a": "\\\\d \\\\x \\\\u12 \'"}'),
        ('{"a": "\\ud83d\\ude00 \\ud83d \\ude00"}', '{"a": "\\ud83d\\ude00 \\ufffd \\ufffd"}'),
        ('{"a": "two\nlines"}', '{"a": "two\\nlines"}'),
        ('{"a": .5, "b": 0x1F, "c": 1_000}', '{"a": 0.5, "b": 31, "c": 1000}'),
        ('{"d": +3, "e": 1., "f": 007}', '{"d": 3, "e": 1.0, "f": 7}'),
        ('{"a": NaN, "b": -Infinity, "c": True}', '{"a": null, "b": null, "c": true}'),
        ('{"a": 1e5, "b": -0.0, "c": 12345678901234567890123}', '{"a": 1e5, "b": -0.0, "c": 12345678901234567890123}'),
    ],
)  # fmt: skip
def test_examples(written, sent):
    assert checked([written]) == checked(written) == sent
    json.loads(sent)


def test_deep_and_long_arguments_take_linear_time():
    for unit in ("[", '{"a": ', '"', "\\", " ", '{"a": 1, ', "\\ud83d", "[1, "):
        text = '{"a": ' + unit * (200_000 // len(unit))
        start = time.process_time()
        assert isinstance(json.loads(checked([text])), dict)
        checked([text[i : i + 40] for i in range(0, len(text), 40)])
        assert time.process_time() - start < 20, unit


class Sloppy(ToolParser):
    """A parser of a plugin that emits what it gets as the arguments of two calls."""

    def stream(self):
        return _Sloppy()


class _Sloppy(ToolStream):
    def feed(self, text):
        self.num_calls += 1
        i = self.num_calls - 1
        return [ToolCallDelta(i, f"id{i}", "f"), *(ToolCallDelta(i, arguments=c) for c in text)]

    def finish(self):
        return []


def test_the_parsers_of_plugins_are_checked_too():
    stream = OutputParser(tools=Sloppy()).stream()
    first = stream.feed('{"a": "x')
    assert first[0] == ToolCallDelta(0, "id0", "f") and all(delta.arguments for delta in first[1:])
    second = stream.feed('{"b": 1')
    assert second[:2] == [ToolCallDelta(0, arguments='"}'), ToolCallDelta(1, "id1", "f")]
    assert "".join(delta.arguments for delta in [*second[2:], *stream.finish()]) == '{"b": 1}'
    assert Sloppy().parse("[").tool_calls[0].arguments == "{}"
    assert not any(isinstance(delta, ContentDelta) for delta in first + second)
