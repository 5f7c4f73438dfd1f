"""Every reasoning format: outputs as models write them, all of their prefixes, all ways to cut them, and garbage."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest

from mvllm.entrypoints.parsers import registry
from mvllm.entrypoints.parsers.interface import ContentDelta, ReasoningDelta, merge_deltas
from mvllm.entrypoints.parsers.registry import canonical_reasoning_parser, reasoning_parser_names

# (prompt's end, output, reasoning, content). The comment says what the case shows of the format.
QWEN = "<|im_start|>assistant\n"
DEEPSEEK = "<｜Assistant｜>"
KIMI = "<|im_assistant|>assistant<|im_middle|>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
HARMONY = "<|start|>assistant"
HARMONY_CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
QWEN_CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
GEMMA_CALL = "<|tool_call>call:f{a:1}<tool_call|>"
MINIMAX_CALL = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'

CASES: dict[str, list[tuple[str | None, str, str | None, str]]] = {
    "qwen3": [
        (QWEN, "<think>\nI add.\n</think>\n\n4", "I add.", "4"),
        (QWEN + "<think>\n", "I add.\n</think>\n\n4", "I add.", "4"),  # opened by the template
        (QWEN + "<think>\n", "I add. And", "I add. And", ""),  # cut off
        (QWEN + "<think>\n\n</think>\n\n", "4 < 5", None, "4 < 5"),  # enable_thinking false
        (QWEN, "4", None, "4"),
        (QWEN + "<think>\n", f"I call <tool_call> f.\n{QWEN_CALL}", "I call <tool_call> f.", QWEN_CALL),
    ],
    "deepseek_r1": [
        (DEEPSEEK + "<think>\n", "I add.\n</think>\n\n4", "I add.", "4"),
        (DEEPSEEK, "<think>\nI add.\n</think>\n\n4", "I add.", "4"),
        (None, "I add.</think>4", "I add.", "4"),
        (DEEPSEEK, "I add", "I add", ""),
    ],
    "deepseek_v3": [
        (DEEPSEEK + "<think>", "I add.</think>4", "I add.", "4"),  # thinking true
        (DEEPSEEK + "</think>", "4</think>", None, "4</think>"),  # thinking false
        (DEEPSEEK, "4", None, "4"),
    ],
    "kimi_k2": [
        (KIMI, "<think>I add.</think>4", "I add.", "4"),
        (KIMI + "<think>", "I add.</think>4", "I add.", "4"),
        (KIMI + "<think></think>", "4", None, "4"),  # thinking false
        (KIMI, f"<think>I call. {KIMI_CALL}", "I call.", KIMI_CALL),
        (KIMI, "I add", "I add", ""),
    ],
    "glm45": [
        ("<|assistant|>", "\n<think>I add.</think>\n4", "I add.", "4"),
        ("<|assistant|>\n<think></think>", "\n4", None, "4"),  # enable_thinking false
        ("<|assistant|>", f"<think>I call.</think>{GLM_CALL}", "I call.", GLM_CALL),
    ],
    "glm47": [
        ("<|assistant|><think>", "I add.</think>4", "I add.", "4"),
        ("<|assistant|></think>", "4", None, "4"),
        ("<|assistant|><think>", f"I call.{GLM_CALL}", "I call.", GLM_CALL),
    ],
    "granite": [
        (
            "assistant<|end_of_role|>",
            "Here is my thought process: I add.\n\nHere is my response: 4 = 2 + 2",
            "I add.",
            "4 = 2 + 2",
        ),
        ("", "Here's my thought process:\nI add. Here is mine.\nHere's my response:\n4", "I add. Here is mine.", "4"),
        ("", "<think>I add.</think>\n<response>\n4 </p>\n</response>\n", "I add.", "4 </p>"),
        ("", "Here is my answer: 4", None, "Here is my answer: 4"),
        ("", "Here is my thought process: I", "I", ""),
    ],
    "minimax_m2": [
        ("]~b]ai\n<think>\n", "I add.\n</think>\n\n4", "I add.", "4"),
        ("]~b]ai\n<think>\n", f"I call.\n{MINIMAX_CALL}", "I call.", MINIMAX_CALL),
        (None, "I add.", "I add.", ""),
    ],
    "minimax_m2_append_think": [
        ("]~b]ai\n<think>\n", "I add.\n</think>\n\n4", None, "<think>I add.\n</think>\n\n4"),
        ("]~b]ai\n<think>\n", "", None, ""),
    ],
    "mistral": [
        ("[/INST]", "[THINK]I add [1].[/THINK]4", "I add [1].", "4"),
        ("[/INST]", "[TOOL_CALLS]f[ARGS]{}", None, "[TOOL_CALLS]f[ARGS]{}"),
        ("[/INST]", "[THINK]I add", "I add", ""),
    ],
    "gemma4": [
        ("<|turn>model\n", "<|channel>thought\nI add.\n<channel|>4", "I add.", "4"),
        ("<|turn>model\n", "<|channel>I add.<channel|>4", "I add.", "4"),  # without the label
        ("<|turn>model\n<|channel>thought\n<channel|>", "4", None, "4"),  # enable_thinking false
        ("<|turn>model\n", f"<|channel>thought\nI call.\n{GEMMA_CALL}", "I call.", GEMMA_CALL),
        ("<|turn>model\n", "<|channel>thou", "thou", ""),
    ],
    "olmo3": [
        (QWEN + "<think>", "I add.\n\n</think>\n4", "I add.", "4"),
        (None, "<think>I add.</think>4", "I add.", "4"),
    ],
    "nemotron_v3": [
        (QWEN + "<think>\n", "I add.\n</think>\n4", "I add.", "4"),
        (QWEN + "<think></think>", "4", None, "4"),  # enable_thinking false
        (QWEN + "<think>\n", f"I call.\n{QWEN_CALL}", "I call.", QWEN_CALL),
    ],
    "seed_oss": [
        ("<seed:bos>assistant\n", "<seed:think>I add.</seed:think>4", "I add.", "4"),
        ("<seed:bos>assistant\n", "4", None, "4"),
    ],
    "ernie45": [
        ("Assistant: <think>\n", "I add.\n</think>\n\n<response>\n4\n</response>\n", "I add.", "4"),
        ("Assistant: <think>\n", "I add.\n</think>\n4 <response>", "I add.", "4 <response>"),
    ],
    "hunyuan_a13b": [
        ("", "<think>\nI add.\n</think>\n<answer>\n4\n</answer>", "I add.", "4"),
        ("", "<think>\n\n</think>\n<answer>\n4 < </answer> 5", None, "4 < 5"),
    ],
    "gpt_oss": [
        (
            HARMONY,
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            "I add.",
            "4",
        ),
        (
            HARMONY,
            f"<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
            f"<|end|>{HARMONY_CALL}",
            "I call.",
            f"Wait.{HARMONY_CALL}",
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4",
            "One.\nTwo.",
            "4",
        ),
        (HARMONY, "<|channel|>final<|message|>4", None, "4"),
        (HARMONY, "<|channel|>analysis<|message|>I ad", "I ad", ""),
        (HARMONY + "<|channel|>analysis<|message|>", "I add.<|end|>", "I add.", ""),
        (HARMONY, "4", None, "4"),
    ],
}
reasoning_parser = cache(registry.reasoning_parser)  # a look-up reads the metadata of every distribution
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]


def parse(name: str, pieces: list[str], prompt: str | None) -> tuple[str | None, str]:
    stream = reasoning_parser(name)().stream(prompt)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    deltas += stream.finish()
    assert all(isinstance(delta, ContentDelta | ReasoningDelta) and delta.text for delta in deltas)
    parsed = merge_deltas(deltas)
    return parsed.reasoning, parsed.content


def test_every_format_has_cases():
    assert set(CASES) <= set(reasoning_parser_names())
    own = {name for name in reasoning_parser_names() if reasoning_parser(name).__module__.startswith("mvllm")}
    assert own == set(CASES)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), ALL)
def test_published_outputs_however_they_are_cut(name, prompt, text, reasoning, content):
    expected = reasoning, content
    assert parse(name, [text], prompt) == parse(name, list(text), prompt) == expected
    for i in range(len(text)):
        assert parse(name, [text[:i], text[i:]], prompt) == expected, text[:i]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), ALL)
def test_every_prefix_gives_a_beginning_of_the_result(name, prompt, text, reasoning, content):
    """What is emitted before the end is never retracted, and a cut output has the same result in pieces and whole."""
    stream = reasoning_parser(name)().stream(prompt)
    said: dict[type, str] = {ReasoningDelta: "", ContentDelta: ""}
    for i, c in enumerate(text):
        for delta in stream.feed(c):
            said[type(delta)] += delta.text
        assert (reasoning or "").startswith(said[ReasoningDelta]) and content.startswith(said[ContentDelta])
        prefix = text[: i + 1]
        assert parse(name, [prefix], prompt) == parse(name, list(prefix), prompt)


@pytest.mark.parametrize("name", CASES)
def test_garbage_never_raises_and_does_not_depend_on_the_cut(name):
    rng = random.Random(name)
    markers = [*reasoning_parser(name).markers, *(reasoning_parser(name).tags or ())]
    parts = [*markers, *(m[: len(m) // 2] for m in markers), " ", "\n", "a", "<", "|", "é", "\x00", "\U0001f600", "{"]
    for _ in range(60):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for prompt in (None, "", *(prompt for prompt, *_ in CASES[name])):
            assert parse(name, [text], prompt) == parse(name, pieces, prompt) == parse(name, list(text), prompt)


def test_white_space_in_wrapped_content_takes_linear_time():
    stream = registry.reasoning_parser("hunyuan_a13b")().stream()
    deltas = stream.feed("<think>a</think><answer>b")
    start = time.process_time()
    for _ in range(80_000):
        deltas += stream.feed(" ")
    assert time.process_time() - start < 10  # at a quadratic cost, minutes
    assert merge_deltas([*deltas, *stream.feed("c"), *stream.finish()]).content == f"b{' ' * 80_000}c"


@pytest.mark.parametrize("name", CASES)
def test_in_reasoning_is_true_between_the_tags(name):
    parser = reasoning_parser(name)()
    if parser.tags is None:
        return
    start, end = parser.tags
    stream = parser.stream("")
    stream.feed(start)
    assert stream.in_reasoning
    stream.feed("I add.")
    assert stream.in_reasoning
    stream.feed(end + "4")
    assert not stream.in_reasoning
    tags = parser.thinking_tags or parser.tags
    assert tags[0] == start and all(tags)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("deepseek-r1", "deepseek_r1"), ("openai_gptoss", "gpt_oss"), ("gpt-oss", "gpt_oss"), ("nemotron", "nemotron_v3")],
)
def test_names_of_other_engines(alias, name):
    assert canonical_reasoning_parser(alias) == name
    assert reasoning_parser(alias) is reasoning_parser(name)
    assert canonical_reasoning_parser("my-own") == "my-own"
