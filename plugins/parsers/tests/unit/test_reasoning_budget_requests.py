"""Thinking budgets over HTTP in formats with tags of their own."""

from __future__ import annotations

import pytest

from tests.unit.entrypoints.scripted_server import Server
from tests.unit.entrypoints.test_reasoning_requests import (
    ASK,
    COMPLETIONS,
    CONTINUED,
    check_budget,
    check_budget_without_opening_tag,
    check_continued,
    folder,  # noqa: F401  (a fixture)
)


def test_a_budget_ends_the_thoughts_of_the_parsers_format(folder: str) -> None:  # noqa: F811
    check_budget(folder, "mistral", "[/THINK]")


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
def test_a_tool_call_ends_thoughts_that_no_tag_opens(folder: str, path: str) -> None:  # noqa: F811
    """Outputs of Kimi K2 begin within the thoughts, and a tool call ends them."""
    check_budget_without_opening_tag(folder, path, "kimi_k2", ["<|tool_calls_section_begin|>"])


@pytest.mark.parametrize(("begun", "is_thought"), CONTINUED)
def test_a_continued_message_has_a_budget(folder: str, begun: str, is_thought: bool) -> None:  # noqa: F811
    check_continued(folder, "kimi_k2", begun, is_thought)


def test_thoughts_that_stay_in_the_content_have_a_budget(folder: str) -> None:  # noqa: F811
    server = Server(folder, "x", reasoning_parser="minimax_m2_append_think")
    assert server.post({**ASK, "thinking_token_budget": 5}).status_code == 200
    params = server.core.requests[0].sampling_params
    assert params.thinking_token_budget == 5 and not params.thinking_tokens.starts
