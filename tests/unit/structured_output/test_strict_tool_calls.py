"""Structural tags of a tool call format: which calls a grammar allows when a function is strict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.parsers.registry import tool_parser
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.sandbox_main import CompileJob, compile_job
from tests.unit.structured_output.test_grammar_compiler import vocabulary  # noqa: F401  (a fixture)

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
    "$defs": {"days": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "get_time"}},
]
Call = tuple[str, dict[str, Any]]


def structural_tag(name: str, tools: list[dict[str, Any]] = TOOLS) -> dict[str, Any] | None:
    return parse_tool_choice(tools).structural_tag(tool_parser(name)(tools))


def make_checker(name: str, tokenizer: Any, write: Callable[[Sequence[Call]], str]) -> Callable[..., bool]:
    """A function that says whether a format's grammar allows calls, with text around them."""
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)
    constraint = output_constraint(request, parse_tool_choice(TOOLS), tool_parser(name))
    assert constraint is not None and constraint.field == "tools"
    result = compile_job(tokenizer, CompileJob("structural_tag", str(constraint.params.structural_tag)))
    assert result.grammar is not None, result.error
    api = llguidance_library.load()

    def allows(*calls: Call) -> bool:
        text = f"Let me look.\n{write(calls)}\nWell" if calls else "Just text."
        matcher = api.LLMatcher(tokenizer, result.grammar, log_level=0)
        return all(matcher.consume_token(token) for token in tokenizer.tokenize_str(text)) and matcher.is_accepting()

    return allows


def check_arguments(allows: Callable[..., bool]) -> None:
    """The arguments of all functions follow their schemas."""
    assert allows()
    assert allows(("get_weather", {"city": "Köln <b>", "days": 3, "unit": "C"}), ("get_time", {}))
    assert allows(("get_weather", {"city": "x"}))
    assert not allows(("get_weather", {"city": "x", "days": "three"}))
    assert not allows(("get_weather", {"city": "x", "unit": "K"}))
    assert not allows(("get_weather", {"days": 3}))
    assert not allows(("get_weather", {"city": "x", "more": 1}))


def in_tags(calls: Sequence[Call]) -> str:
    objects = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Any) -> Any:  # noqa: F811
    return vocabulary.build()


def test_the_arguments_of_all_functions_follow_their_schemas(tokenizer: Any) -> None:
    allows = make_checker("hermes", tokenizer, in_tags)
    check_arguments(allows)
    assert not allows(("get_rain", {"city": "x"}))


def test_only_auto_with_a_strict_function_is_constrained() -> None:
    assert structural_tag("hermes") is not None and structural_tag("hermes", [TOOLS[1]]) is None
    for choice in ("none", "required"):
        assert parse_tool_choice(TOOLS, choice).structural_tag(tool_parser("hermes")(TOOLS)) is None


def test_special_tokens_in_tags_are_matched_as_tokens(tokenizer: Any) -> None:
    """Also inside the beginning of a structure, and outside of structures where the tag lists them."""
    tag = {
        "structures": [{"begin": "<f><|im_start|>x", "schema": {"type": "integer"}, "end": "<|im_start|>"}],
        "triggers": ["<f>"],
        "special_tokens": ["<|im_start|>"],
    }
    result = compile_job(tokenizer, CompileJob("structural_tag", json.dumps(tag)))
    assert result.grammar is not None, result.error
    matcher = llguidance_library.load().LLMatcher(tokenizer, result.grammar, log_level=0)
    for text in ("<|im_start|>a", "b<f><|im_start|>x5<|im_start|>", "c"):
        for token in tokenizer.tokenize_str(text, parse_special=True):
            assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()
