"""Outputs that are nearly well-formed, in every format: empty sections, and tags that are missing or repeated.

Whatever the text: nothing raises, the arguments are JSON, no special token and no tag of an empty section is content,
and the streamed result is that of the whole text.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest
from plugins.parsers.tests.unit.test_all_tool_formats import TOOLS, WRITERS, T, W, every_format, random_cuts

from mvllm.entrypoints.parsers.interface import merge_deltas
from mvllm.entrypoints.parsers.markers import is_special
from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import reasoning_parser, reasoning_parser_names, tool_parser
from tests.unit.entrypoints.parsers.parser_helpers import without_ids

TAG = re.compile(r"<[^<>\n]*>|\[[A-Z_]+\]")
TEXT_TAG = re.compile(
    r"</?(?:tool_call|arg_key|arg_value|function|parameter|invoke|minimax:tool_call|function_calls)\b"
)

SECTIONS = {
    "hermes": [("<tool_call>", "</tool_call>")],
    "granite4": [("<tool_call>", "</tool_call>")],
    "llama3_json": [("<|python_tag|>", "")],
    "mistral": [("[TOOL_CALLS]", "")],
    "llama4_pythonic": [("<|python_start|>", "<|python_end|>")],
    "olmo3": [("<function_calls>", "</function_calls>")],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ],
    "deepseek_v31": [
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ],
    "deepseek_v32": [("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")],
    "kimi_k2": [
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"),
    ],
    "glm45": [("<tool_call>", "</tool_call>")],
    "glm47": [("<tool_call>", "</tool_call>")],
    "qwen3_coder": [("<tool_call>", "</tool_call>")],
    "minimax_m2": [("<minimax:tool_call>", "</minimax:tool_call>")],
    "granite": [("<|tool_call|>", ""), ("<|tool_call|>[", "]"), ("<tool_call>[", "]</tool_call>")],
    "phi4_mini": [("<|tool_call|>", "<|/tool_call|>"), ("<|tool_call|>[", "]<|/tool_call|>")],
    "gemma4": [("<|tool_call>", "<tool_call|>")],
    "functiongemma": [("<start_function_call>", "<end_function_call>")],
    "gpt_oss": [("<|start|>", "<|end|>"), ("<|channel|>", "<|call|>"), ("<|start|>assistant", "<|return|>")],
}
"""Tags around calls, by parser."""


@cache
def parser_class(name):
    return tool_parser(name)


def check(name, text, reason="stop"):
    """The parsed text, after checks."""
    parser = OutputParser(tools=parser_class(name)(TOOLS))
    rng = random.Random(text)
    results = []
    for pieces in ([text], list(text), [*re.split(f"({TAG.pattern})", text)], random_cuts(rng, text, 7)):
        stream = parser.stream()
        deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish(reason)
        results.append(merge_deltas(deltas))
    assert all(without_ids(one) == without_ids(results[0]) for one in results[1:]), text
    for call in results[0].tool_calls:
        if reason == "stop":
            assert isinstance(json.loads(call.arguments), dict), (text, call)
        assert call.arguments[:1] == "{" and call.name
    special = [tag for tag in TAG.findall(results[0].content) if is_special(tag) and tag in parser.markers]
    assert not special, (text, results[0].content)
    return results[0]


def found_calls(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def test_every_format_with_tags_is_here():
    assert set(SECTIONS) | {"pythonic"} == {name for name, _ in WRITERS}


@pytest.mark.parametrize("name", SECTIONS)
def test_sections_without_calls_leave_no_tags(name):
    """Empty, with white space, cut off, doubled, after text, and before and after a section with calls."""
    write = dict(WRITERS)[name]
    for start, end in SECTIONS[name]:
        for inner in ("", " ", "\n", "\n\n  \n"):
            empty = start + inner + end
            doubled = empty if "]" in end else empty + end
            for text in (empty, start + inner, empty + "\n" + empty, start + inner + empty, doubled):
                assert without_ids(check(name, text)) == (check(name, text).content, [], None)
                assert not check(name, text).content.strip(), (text, check(name, text))
                assert check(name, "Hello.\n" + text).content.strip() == "Hello.", text
            if end:  # else the text may be a function's name
                assert check(name, f"Hello.\n{empty}\nBye.").content.split() == ["Hello.", "Bye."], empty
            for text in (empty + write([W]), write([W]) + empty, empty + "\n" + write([W]) + "\n" + empty):
                parsed = check(name, text)
                assert found_calls(parsed) == [W] and not parsed.content.strip(), (text, parsed)


@every_format
class TestEveryFormat:
    def test_texts_that_are_cut_off_at_a_tag_have_no_tags(self, name, write):
        text = "Hello.\n" + write([W, T])
        for found in TAG.finditer(text):
            for end in (found.start(), found.end()):
                for reason in ("stop", "length"):
                    parsed = check(name, text[:end], reason)
                    assert parsed.content.strip() == "Hello.", text[:end]

    def test_arguments_of_a_call_that_ends_without_its_tags_are_closed(self, name, write):
        """After `stop`. After `length` they remain a prefix, which is not JSON before the last brace."""
        text = write([W])
        done = [W[1], {"city": "Paris"}, {}]
        for end in range(len(text)):
            calls = found_calls(check(name, text[:end]))
            if calls:
                [(called, arguments)] = calls
                assert called == "get_weather" and list(arguments) == list(W[1])[: len(arguments)]
                assert arguments in done or "Paris".startswith(arguments["city"])
            cut = check(name, text[:end], "length").tool_calls
            assert len(cut) == len(calls) and all('{"city": "Paris", "days": 3}'.startswith(c.arguments) for c in cut)

    def test_two_sections_and_text_between_them(self, name, write):
        parsed = check(name, f"A\n{write([W])}\nB\n{write([T])}\nC")
        assert found_calls(parsed) == [W, T] and parsed.content.split() == ["A", "B", "C"]

    def test_a_repeated_tag_is_no_content(self, name, write):
        text = write([W])
        for found in TAG.finditer(text):
            parsed = check(name, text[: found.end()] + text[found.start() :])
            assert not TEXT_TAG.search(parsed.content), (found, parsed.content)

    def test_a_missing_tag_harms_nothing_else(self, name, write):
        """The calls after it are found, except where the tag was the end of a string."""
        text = write([W]) + "\n" + write([T])
        for found in TAG.finditer(text):
            check(name, text[: found.start()] + text[found.end() :])
            check(name, text[: found.start()] + "<x>" + text[found.end() :])

    def test_any_mixture_of_tags_and_texts(self, name, write):
        rng = random.Random(name)
        text = write([W, T])
        parts = [*TAG.findall(text), *TAG.findall(text), text, text[: len(text) // 2], text[len(text) // 2 :]]
        parts += ["\n", " ", "a", "{", "}", "[", "]", '"', "get_time", "None", "1", "<", "=", "(", ")", ","]
        for _ in range(20):
            mixed = "".join(rng.choices(parts, k=rng.randint(1, 9)))
            check(name, mixed)
            check(name, mixed, "length")


def test_stray_tags_around_calls():
    """What models are known to write: a missing opening tag, opening tags without calls, a closing tag at the end."""
    call = "<function=get_time>\n</function>"
    for text in (
        call + "\n</tool_call>",
        f"{call}\n</tool_call>\n</tool_call>",
        f"<tool_call>{call}</tool_call></tool_call>",
    ):
        parsed = check("qwen3_coder", f"I look.\n{text}\n")
        assert (parsed.content.strip(), found_calls(parsed)) == ("I look.", [T])
    assert check("qwen3_coder", "Done.\n</tool_call>").content.strip() == "Done."
    assert check("qwen3_coder", "The tag </tool_call> ends a call.").content == "The tag </tool_call> ends a call."
    for text in ("<|tool_call>", "<|tool_call>\n<|tool_call>", "<|tool_call><|tool_call>call:get_time{}<tool_call|>"):
        parsed = check("gemma4", "I look. " + text)
        assert parsed.content.strip() == "I look." and len(parsed.tool_calls) == text.count("call:")
    assert check("gemma4", "<|tool_call>get_time{}<tool_call|>").content == "get_time{}"


@pytest.mark.parametrize("name", reasoning_parser_names())
def test_reasoning_that_is_cut_off_or_has_repeated_tags(name):
    """With the tools of its family or without any: nothing raises, and the result does not depend on the split."""
    reasoning_class = reasoning_parser(name)
    start, end = reasoning_class.tags or ("<think>", "</think>")
    text = f"{start}I think.{end}Answer."
    rng = random.Random(name)
    texts = [
        text,
        text[len(start) :],
        start + text,
        text.replace(end, end * 2),
        start + end + "Answer.",
        end,
        start,
        "",
    ]
    for tools in (None, "hermes", "qwen3_coder", "gpt_oss"):
        for whole in texts:
            for cut in {len(whole), *(rng.randrange(len(whole) + 1) for _ in range(6))}:
                found = parser_class(tools)() if tools else None
                parser = OutputParser(tools=found, reasoning=reasoning_class())
                expected = without_ids(parser.parse(whole[:cut]))
                for pieces in (list(whole[:cut]), random_cuts(rng, whole[:cut], 5)):
                    stream = parser.stream()
                    deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish()
                    assert without_ids(merge_deltas(deltas)) == expected, whole[:cut]
