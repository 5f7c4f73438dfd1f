"""Structural tags of tool call formats: which calls a grammar allows when a function is strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.output_constraint import output_constraint
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.parsers.registry import tool_parser, tool_parser_names
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.sandbox_main import CompileJob, compile_job
from tests.unit.entrypoints.parsers.test_all_tool_formats import WRITERS, json_list
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
FREE = {"gemma4", "functiongemma"}
"""Formats that no structural tag constrains."""


def one_by_one(write: Any) -> Any:
    """Lists of one call each: a structural tag has no lists of several."""
    return lambda calls: "\n".join(write([call]) for call in calls)


def python(calls: Any) -> str:
    """A list of calls with JSON's literals."""
    written = (
        f"{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in a.items())})" for name, a in calls
    )
    return f"[{', '.join(written)}]"


WRITE = dict(WRITERS) | {name: one_by_one(json_list("<|tool_call|>")) for name in ("granite", "phi4_mini")}
WRITE |= dict.fromkeys(("pythonic", "llama4_pythonic", "olmo3"), python)
WRITE["phi4_mini"] = one_by_one(json_list("functools"))
CONSTRAINED = sorted({name for name, _ in WRITERS} - FREE)


def structural_tag(name: str, tools: list[dict[str, Any]] = TOOLS) -> dict[str, Any] | None:
    return parse_tool_choice(tools).structural_tag(tool_parser(name)(tools))


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Any) -> Any:  # noqa: F811
    return vocabulary.build()


@pytest.fixture(params=CONSTRAINED)
def check(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    """Whether a format's grammar allows calls, with text around them."""
    name = request.param
    request_ = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)
    constraint = output_constraint(request_, parse_tool_choice(TOOLS), tool_parser(name))
    assert constraint is not None and constraint.field == "tools"
    result = compile_job(tokenizer, CompileJob("structural_tag", str(constraint.params.structural_tag)))
    assert result.grammar is not None, result.error
    api = llguidance_library.load()

    def allows(*calls: tuple[str, dict[str, Any]]) -> bool:
        text = f"Let me look.\n{WRITE[name](calls)}\nWell" if calls else "Just text."
        matcher = api.LLMatcher(tokenizer, result.grammar, log_level=0)
        return all(matcher.consume_token(token) for token in tokenizer.tokenize_str(text)) and matcher.is_accepting()

    allows.format = name  # type: ignore[attr-defined]
    return allows


def test_the_arguments_of_all_functions_follow_their_schemas(check: Any) -> None:
    assert check()
    assert check(("get_weather", {"city": "Köln <b>", "days": 3, "unit": "C"}), ("get_time", {}))
    assert check(("get_weather", {"city": "x"}))
    assert not check(("get_weather", {"city": "x", "days": "three"}))
    assert not check(("get_weather", {"city": "x", "unit": "K"}))
    assert not check(("get_weather", {"days": 3}))
    assert not check(("get_weather", {"city": "x", "more": 1}))
    # In Python's syntax only the known names are triggers.
    assert check(("get_rain", {"city": "x"})) == (check.format in ("pythonic", "llama4_pythonic", "olmo3"))


def test_only_auto_with_a_strict_function_is_constrained() -> None:
    lax = [TOOLS[1]]
    assert structural_tag("hermes", lax) is None
    for choice in ("none", "required"):
        assert parse_tool_choice(TOOLS, choice).structural_tag(tool_parser("hermes")(TOOLS)) is None
    assert {name for name in tool_parser_names() if structural_tag(name) is None} == FREE


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
