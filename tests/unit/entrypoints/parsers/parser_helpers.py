"""Runs parsers in tests, and a simple reference parser for well-formed texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from mvllm.entrypoints.parsers.interface import ContentDelta, ParsedOutput, ReasoningDelta, ToolCallDelta, merge_deltas
from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import reasoning_parser, tool_parser

TOOLS = ("hermes",)
REASONING = ("deepseek_r1", "qwen3")
"""Core's own parsers."""

MARKERS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>",
)  # fmt: skip


def make_parser(tools: str | None = None, reasoning: str | None = None) -> OutputParser:
    return OutputParser(
        tools=tool_parser(tools)() if tools else None, reasoning=reasoning_parser(reasoning)() if reasoning else None
    )


def stream_deltas(parser, pieces: Sequence[str], prompt: str | None = None):
    """All deltas, after checks of each delta."""
    stream = parser.stream(prompt) if prompt is not None else parser.stream()
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    deltas += stream.finish()
    begun = 0
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None:
                assert (delta.index, delta.arguments) == (begun, "") and delta.name
                begun += 1
            else:
                assert delta.index == begun - 1 and delta.name is None and delta.arguments
        else:
            assert isinstance(delta, ContentDelta | ReasoningDelta) and delta.text
    assert stream.num_calls == begun
    return deltas


def streamed(parser, pieces: Sequence[str], prompt: str | None = None) -> ParsedOutput:
    return merge_deltas(stream_deltas(parser, pieces, prompt))


def without_ids(parsed: ParsedOutput) -> tuple[Any, ...]:
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls], parsed.reasoning


def assert_split_is_irrelevant(parser, text: str, at: Sequence[int], prompt: str | None) -> None:
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


def assert_text_without_calls_is_content(parser, text: str) -> None:
    parsed = parser.parse(text)
    if not parsed.tool_calls:
        content, all_text = without_tags(parser, parsed.content), without_tags(parser, text)
        assert all_text.startswith(content)  # a call at the end may be cut off
        assert content == all_text or any(marker in text for marker in parser.markers)
    safe = "".join(c for c in text if c not in '{}"')
    parsed = parser.parse(safe)
    assert not parsed.tool_calls
    if not any(marker in safe for marker in parser.markers):
        assert parsed.content == safe


def assert_time_is_linear(parser, unit: str, open_call: str) -> None:
    """Parses long texts of repetitions of `unit`. A quadratic step would take minutes to hours."""
    long = unit * (120_000 // len(unit))
    for text in (long, open_call + long):
        assert without_ids(streamed(parser, text[:10_000])) == without_ids(parser.parse(text[:10_000]))
        parser.parse(text)


def without_tags(parser, text: str) -> str:
    """The text without the format's tags and special tokens, empty lists of calls, and white space."""
    before = None
    text = "".join(text.split())
    tags = [*getattr(parser.stream()._tools, "_markers", ()), *parser.markers, "[]"]
    while text != before:
        before = text
        for tag in tags:
            text = text.replace("".join(tag.split()), "")
    return text


def cut(text: str, at: Sequence[int]) -> list[str]:
    """Random pieces of `text`; some may be empty."""
    places = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6) | st.sampled_from(MARKERS), json_values | st.sampled_from(MARKERS))
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
layouts = st.builds(
    lambda indent, ascii_only: {"indent": indent, "ensure_ascii": ascii_only},
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)


@dataclass
class Written:
    """A tool call in a model's format."""

    name: str
    arguments: str

    def as_object(self, key: str = "arguments", *, name_last: bool = False) -> str:
        parts = [f'"name": {json.dumps(self.name)}', f'"{key}": {self.arguments}']
        return "{" + ", ".join(reversed(parts) if name_last else parts) + "}"


calls = st.builds(lambda name, args, how: Written(name, json.dumps(args, **how)), names, arguments, layouts)

_fragments = [
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": ',
    '<tool_call>[{"name": "f"}, ', "<tool_call>{'arguments': \"{}\", 'name': ", '<tool_call>{"name": "f", ',
    '[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]f[ARGS]{", '[TOOL_CALLS] [{"name": "f"}, ', "[TOOL_CALLS]f[CALL_ID]1",
    '\n{"name": "f", "parameters": {}}', '<|python_tag|>{"name": "f", "parameters": {}};', '\n{"name": "f", ',
    *MARKERS, *(m[:k] for m in MARKERS for k in (1, 3, len(m) - 1)),
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {"a": [1, {}]}}', '{"name": "f"}',
    '{"name":', '"arguments":', '"f"', "{", "}", "[", "]", ",", ";", ":", '"', "'", "\\", "\\u00", "\n", " ", "\t",
    "None", "Tru", "null", "1e5", "-", "get_x", "a", "é", "\x00", "\U0001f600", '{"a": ', "[{", "}]", "<", "|", "/",
    '{"arguments": {"k": "v"}, "name": "g"}', "{'name': 'f', 'arguments': {'x': None}}", '"{\\"a\\": 1}"',
]  # fmt: skip
messy_text = st.lists(st.sampled_from(_fragments) | st.text(max_size=5), max_size=14).map("".join)
"""Pieces for random texts: complete and broken markers and JSON."""

cuts = st.lists(st.integers(0, 400), max_size=12)
prompts = st.sampled_from([None, "assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"])
