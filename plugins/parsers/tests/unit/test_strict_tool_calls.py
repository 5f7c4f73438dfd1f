"""Structural tags of all tool call formats: which calls a grammar allows when a function is strict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plugins.parsers.tests.unit.test_all_tool_formats import WRITERS, json_list

from mvllm.entrypoints.parsers.registry import tool_parser_names
from tests.unit.structured_output.test_grammar_compiler import vocabulary  # noqa: F401  (a fixture)
from tests.unit.structured_output.test_strict_tool_calls import check_arguments, make_checker, structural_tag

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
CONSTRAINED = sorted({name for name, _ in WRITERS} - FREE - {"hermes"})


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Any) -> Any:  # noqa: F811
    return vocabulary.build()


@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_arguments_of_all_functions_follow_their_schemas(name: str, tokenizer: Any) -> None:
    allows = make_checker(name, tokenizer, WRITE[name])
    check_arguments(allows)
    # In Python's syntax only the known names are triggers.
    assert allows(("get_rain", {"city": "x"})) == (name in ("pythonic", "llama4_pythonic", "olmo3"))


def test_other_formats_are_constrained() -> None:
    assert {name for name in tool_parser_names() if structural_tag(name) is None} == FREE
