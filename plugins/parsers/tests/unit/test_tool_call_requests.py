"""Tool calls over HTTP in formats of single families."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.entrypoints.test_tool_calls import check_call_without_end, folder  # noqa: F401  (a fixture)


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>", {}),
        pytest.param(*("gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>', {}), marks=pytest.mark.exhaustive),
        ("pythonic", '[weather(city="Paris", re=r"\\d", one=(0x1F, .5,)', {"re": "\\d", "one": [31, 0.5]}),
    ],
)
def test_the_arguments_of_a_call_without_an_end_are_json_unless_it_was_cut_off(
    folder: str,  # noqa: F811
    parser: str,
    text: str,
    arguments: dict[str, Any],
) -> None:
    check_call_without_end(folder, parser, text, arguments)
