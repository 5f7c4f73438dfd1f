"""Reasoning, text and calls of one output, laid out as the published chat template of each family renders them.

The layouts were read off conversations rendered by the templates that the models' authors publish.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache

import pytest
from plugins.parsers.tests.unit import test_all_tool_formats as formats
from plugins.parsers.tests.unit.test_all_tool_formats import RICH, TOOLS, T, W, random_cuts

from mvllm.entrypoints.parsers.output_parser import OutputParser
from mvllm.entrypoints.parsers.registry import reasoning_parser, tool_parser
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from tests.unit.entrypoints.parsers.parser_helpers import streamed, without_ids

THOUGHT, TEXT = "I think:\nrain?", "I look."


def qwen3_coder(calls):
    """As the template writes booleans."""
    return formats.qwen3_coder(calls).replace("\ntrue\n", "\nTrue\n")


def gpt_oss(calls):
    """With the recipient before the channel, as the template has it and the model may write it."""
    call = "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{json}<|call|>"
    return "".join(call.format(name=name, json=formats.as_json(arguments)) for name, arguments in calls)


@cache
def parser_class(name, find=tool_parser):
    return find(name)


@dataclass
class Layout:
    """How a template writes a turn.

    Attributes:
        tools, reasoning: Names of the parsers.
        write: Writes the calls.
        prompt: End of the prompt of an output that reasons.
        thought: The reasoning, with `{}` for its text.
        closed: End of the prompt that switches the reasoning off; None if there is no such switch.
        text: The content before calls.
    """

    tools: str
    reasoning: str
    write: object
    prompt: str
    thought: str
    closed: str | None
    text: str

    def parser(self, tools=TOOLS, single_call=False):
        found = parser_class(self.tools)(tools), parser_class(self.reasoning, reasoning_parser)()
        return OutputParser(tools=found[0], reasoning=found[1], single_call=single_call)


LAYOUTS = {
    "Qwen3": Layout(
        *("hermes", "qwen3", formats.hermes, "<|im_start|>assistant\n", "<think>\n{}\n</think>\n\n"),
        *("<|im_start|>assistant\n<think>\n\n</think>\n\n", "{}\n"),
    ),
    "Qwen3.5": Layout(
        *("qwen3_coder", "qwen3", qwen3_coder, "<|im_start|>assistant\n<think>\n", "{}\n</think>\n\n"),
        *("<|im_start|>assistant\n<think>\n\n</think>\n\n", "{}\n\n"),
    ),
    "MiniMax-M2": Layout(
        "minimax_m2", "minimax_m2", formats.minimax_m2, "]~b]ai\n<think>\n", "{}\n</think>\n\n\n", None, "{}\n"
    ),
    "GLM-4.6": Layout(
        *("glm45", "glm45", formats.glm("\n"), "<|assistant|>", "\n<think>{}</think>\n"),
        *("<|assistant|>\n<think></think>", "\n{}\n"),
    ),
    "GLM-4.7": Layout(
        "glm47", "glm45", formats.glm(""), "<|assistant|><think>", "{}</think>", "<|assistant|></think>", "{}"
    ),
    "DeepSeek-R1": Layout(
        "deepseek_v3", "deepseek_r1", formats.deepseek_v3, "<｜Assistant｜><think>\n", "{}\n</think>\n\n", None, "{}"
    ),
    "DeepSeek-V3.1": Layout(
        *("deepseek_v31", "deepseek_v3", formats.deepseek_v31, "<｜Assistant｜><think>", "{}</think>"),
        *("<｜Assistant｜></think>", "{}"),
    ),
    "DeepSeek-V3.2": Layout(
        *("deepseek_v32", "deepseek_v3", formats.deepseek_v32, "<｜Assistant｜><think>", "{}</think>"),
        *("<｜Assistant｜></think>", "{}\n\n"),
    ),
    "Kimi-K2-Thinking": Layout(
        *("kimi_k2", "kimi_k2", formats.kimi_k2, "<|im_assistant|>assistant<|im_middle|>", "<think>{}</think>"),
        *("<|im_assistant|>assistant<|im_middle|><think></think>", "{}"),
    ),
    "gpt-oss": Layout(
        *("gpt_oss", "gpt_oss", gpt_oss, "<|start|>assistant", "<|channel|>analysis<|message|>{}<|end|>", None),
        "<|start|>assistant<|channel|>commentary<|message|>{}<|end|>",
    ),
    "Gemma 4": Layout(
        *("gemma4", "gemma4", dict(formats.WRITERS)["gemma4"], "<|turn>model\n"),
        *("<|channel>thought\n{}\n<channel|>", "<|turn>model\n<|channel>thought\n<channel|>", "{}"),
    ),
    "Nemotron 3": Layout(
        *("qwen3_coder", "nemotron_v3", qwen3_coder, "<|im_start|>assistant\n<think>\n", "{}\n</think>\n"),
        *("<|im_start|>assistant\n<think></think>", "{}\n"),
    ),
}  # fmt: skip
every_family = pytest.mark.parametrize("family", LAYOUTS)


def found(parsed):
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    return parsed.reasoning, parsed.content.strip(), calls


@every_family
def test_turns_round_trip_and_the_result_does_not_depend_on_the_split(family):
    layout, rng = LAYOUTS[family], random.Random(family)
    calls = [W, RICH, T]
    for text in ("", TEXT):
        before = layout.text.format(text) if text else ""
        turns = [(layout.prompt, layout.thought.format(THOUGHT) + before + layout.write(calls), THOUGHT)]
        if layout.closed is not None:
            turns.append((layout.closed, before + layout.write(calls), None))
        for prompt, turn, thought in turns:
            parser = layout.parser()
            whole = parser.parse(turn, prompt)
            assert found(whole) == (thought, text, calls)
            for i in range(0, len(turn), 3):
                assert without_ids(streamed(parser, [turn[:i], turn[i:]], prompt)) == without_ids(whole)
            tokens = re.findall(r"<[^<>\s]*>|\s?\w+|.", turn, re.DOTALL)
            for pieces in (list(turn), tokens, random_cuts(rng, turn, 9)):
                assert without_ids(streamed(parser, pieces, prompt)) == without_ids(whole)


def odd_value(rng, depth=0):
    """A JSON value with markers, quotes, line breaks and other signs of the formats in its strings."""
    parts = [
        "</tool_call>",
        "<parameter=a>",
        "</p",
        "<",
        "｜",
        "```",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "é",
        "北",
        "{",
        "]",
        "1",
        "True",
    ]
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind < 2:
        return "".join(rng.choices(parts, k=rng.randrange(1, 6)))
    if kind < 5:
        return rng.choice([None, True, False, 0, -7, 10**20, 2.5, "", "null", "12"])
    members = [odd_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return members if kind == 5 else {f"k{i}": value for i, value in enumerate(members)}


@every_family
def test_odd_and_truncated_outputs_raise_nothing_and_do_not_depend_on_the_split(family):
    """Calls with odd arguments, several of them, cut off anywhere, with reasoning before; and as a single call."""
    layout, rng = LAYOUTS[family], random.Random(family)
    declared = {"text": formats.STRING, "any": {}, "obj": {"type": "object"}}
    layout_tools = [formats.function("odd", **declared), *TOOLS]
    for round_ in range(80):
        calls = [rng.choice([W, T, ("odd", {"text": odd_value(rng), "any": odd_value(rng), "obj": odd_value(rng)})])]
        calls += rng.choices([W, T, RICH], k=rng.randrange(3))
        turn = rng.choice([layout.thought.format(THOUGHT), "", "<think>"]) + rng.choice(["", layout.text.format(TEXT)])
        turn += layout.write(calls) + rng.choice(["", "", "\nDone.", layout.write([T])])
        if round_ % 2:
            turn = turn[: rng.randrange(len(turn) + 1)]
        parser = layout.parser(layout_tools, single_call=rng.random() < 0.3)
        prompt = rng.choice([layout.prompt, layout.closed or layout.prompt, None])
        whole = without_ids(parser.parse(turn, prompt))
        for size in (1, 3, 15):
            assert without_ids(streamed(parser, random_cuts(rng, turn, size), prompt)) == whole, turn


@every_family
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_enforced_calls_after_reasoning_are_found_however_the_stream_is_cut(family, choice):
    """Their JSON replaces the family's own format; the reasoning before it may be missing or cut off."""
    layout, rng = LAYOUTS[family], random.Random(family)
    tool_choice = parse_tool_choice(TOOLS, choice)
    calls = [W, T] if choice == "required" else [W]
    body = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = json.dumps(body if choice == "required" else W[1])
    parser, after = layout.parser(), layout.thought.format(THOUGHT)
    if layout.reasoning == "gpt_oss":
        after += "<|start|>assistant<|channel|>final<|message|>"
    turn = after + text
    for end in (len(turn), *(rng.randrange(len(turn)) for _ in range(20))):
        cut = turn[:end]
        results = []
        for pieces in ([cut], list(cut), random_cuts(rng, cut, 8)):
            stream = parser.stream(layout.prompt, tool_choice.stream())
            deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish()
            results.append(without_ids(formats.merge_deltas(deltas)))
        assert results[0] == results[1] == results[2]
        if end == len(turn):
            assert results[0][2] == THOUGHT
            assert [(name, json.loads(arguments)) for name, arguments in results[0][1]] == calls
