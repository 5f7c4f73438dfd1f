"""Reasoning parsers: tags in the output and in the prompt."""

from __future__ import annotations

import pytest

from mvllm.entrypoints.parsers.interface import ContentDelta, ReasoningDelta, ToolCallDelta
from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import reasoning_parser, tool_parser
from tests.unit.entrypoints.parsers.parser_helpers import make_parser, stream_deltas, streamed, without_ids

OPEN, CLOSED, PLAIN = "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "assistant\n"

CASES = {
    "qwen3": [
        (None, "<think>\nhm\n\nso\n</think>\n\n4.\n", "hm\n\nso", "4.\n"),
        (PLAIN, "\n<think>hm</think>4", "hm", "4"),
        (PLAIN, "4", None, "4"),
        (PLAIN, "  4 </think>", None, "  4 </think>"),
        (PLAIN, "a <think>b</think>", None, "a <think>b</think>"),
        (PLAIN, "<think>\n\n</think>\n\n4", None, "4"),
        (PLAIN, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (PLAIN, "<think>a < b </thin", "a < b </thin", ""),
        (PLAIN, "<think>cut off\n", "cut off\n", ""),
        (PLAIN, "<thin", None, "<thin"),
        (PLAIN, "", None, ""),
        (PLAIN, " \n", None, " \n"),
        (OPEN, "hm\n</think>\n\n4", "hm", "4"),
        (OPEN, "<think>hm</think>4", "hm", "4"),
        (OPEN, "cut off", "cut off", ""),
        (CLOSED, "4 <think> 5", None, "4 <think> 5"),
        (CLOSED, "\n4", None, "\n4"),
    ],
    "deepseek_r1": [
        (None, "hm\n</think>\n\n4", "hm", "4"),
        (None, "<think>\nhm</think>4", "hm", "4"),
        (OPEN, "hm</think>4", "hm", "4"),
        (OPEN, "</think>\n4", None, "4"),
        (PLAIN, "all of it", "all of it", ""),
        (PLAIN, "<thinking of it", "<thinking of it", ""),
        (CLOSED, "4", None, "4"),
    ],
}


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"), [(n, *case) for n, cases in CASES.items() for case in cases]
)
def test_cases(name, prompt, text, reasoning, content):
    parser = make_parser(None, name)
    expected = (content, [], reasoning)
    assert without_ids(parser.parse(text, prompt)) == without_ids(streamed(parser, text, prompt)) == expected


def test_reasoning_is_streamed_under_both_names():
    stream = make_parser(None, "qwen3").stream(PLAIN)
    assert not stream.in_reasoning
    assert stream.feed("<think>\n") == []
    assert stream.in_reasoning
    assert stream.feed("Let me") == [ReasoningDelta("Let me")]
    assert stream.feed(" see\n") == [ReasoningDelta(" see")]
    assert stream.feed("</think>\n\n4") == [ContentDelta("4")]
    assert not stream.in_reasoning
    assert ReasoningDelta("x").as_json() == {"reasoning": "x", "reasoning_content": "x"}


@pytest.mark.parametrize(("prompt", "opened"), [(OPEN, True), (PLAIN, False), (CLOSED, False), (None, False)])
def test_the_prompt_decides_whether_the_output_starts_in_reasoning(prompt, opened):
    assert make_parser(None, "qwen3").stream(prompt).in_reasoning is opened


def test_reasoning_content_and_calls_in_one_stream():
    text = '<think>\nI <tool_call> it.\n</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parser = make_parser("hermes", "qwen3")
    deltas = stream_deltas(parser, list(text), PLAIN)
    kinds = [type(delta) for delta in deltas]
    assert kinds == sorted(kinds, key=[ReasoningDelta, ContentDelta, ToolCallDelta].index)
    assert without_ids(streamed(parser, text, PLAIN)) == ("Wait.", [("f", "{}")], "I <tool_call> it.")
    assert without_ids(parser.parse(text, PLAIN)) == ("Wait.", [("f", "{}")], "I <tool_call> it.")


TWO_CALLS = '<think>a</think>b<tool_call>{"name": "f"}</tool_call>c<tool_call>{"name": "g"}</tool_call>'


def test_excluded_reasoning_and_extra_calls_are_dropped():
    parser = OutputParser(tools=tool_parser("hermes")(), reasoning=reasoning_parser("qwen3")(), include_reasoning=False)
    assert without_ids(streamed(parser, TWO_CALLS)) == ("bc", [("f", "{}"), ("g", "{}")], None)
    parser = OutputParser(tools=tool_parser("hermes")(), reasoning=reasoning_parser("qwen3")(), single_call=True)
    assert without_ids(parser.parse(TWO_CALLS)) == ("bc", [("f", "{}")], "a")
    assert without_ids(streamed(parser, TWO_CALLS)) == ("bc", [("f", "{}")], "a")


@pytest.mark.parametrize(
    ("text", "reason", "said"),
    [
        (TWO_CALLS, "stop", "tool_calls"),
        (TWO_CALLS, "length", "length"),
        (TWO_CALLS, None, None),
        ("plain", "stop", "stop"),
    ],
)
def test_finish_reason_with_calls(text, reason, said):
    parser = make_parser("hermes", "qwen3")
    stream = parser.stream()
    stream.feed(text)
    stream.finish()
    assert stream.finish_reason(reason) == parser.parse(text).finish_reason(reason) == said


def test_a_whole_answer_as_a_message():
    parser = make_parser("hermes", "qwen3")
    message = parser.parse(TWO_CALLS).as_json()
    assert [call["function"] for call in message.pop("tool_calls")] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": "{}"},
    ]
    thoughts = {"reasoning": "a", "reasoning_content": "a"}
    assert message == {"role": "assistant", "content": "bc", "refusal": None, **thoughts}
    assert parser.parse("").as_json() == {"role": "assistant", "content": "", "refusal": None}
    assert parser.parse('<tool_call>{"name": "f"}</tool_call>').as_json()["content"] is None


def test_without_parsers_all_is_content():
    assert without_ids(streamed(make_parser(), "<think>a")) == ("<think>a", [], None)
    assert (
        make_parser().is_passthrough
        and not make_parser("hermes").is_passthrough
        and not make_parser(None, "qwen3").is_passthrough
    )


@pytest.mark.parametrize(
    ("tools", "reasoning", "special", "needed"),
    [
        ("hermes", None, {"<tool_call>", "</s>"}, True),
        ("hermes", "qwen3", {"<|im_end|>"}, False),
        ("hermes", "qwen3", {"<|im_end|>", "<think>"}, True),
        (None, None, {"<think>"}, False),
    ],
)
def test_needs_special_tokens_if_a_marker_is_one(tools, reasoning, special, needed):
    assert make_parser(tools, reasoning).needs_special_tokens(special) is needed
