"""Calls in prompts: the parser reads what the template of its family renders, and the other way round."""

from __future__ import annotations

import pytest

from tests.unit.entrypoints.parsers.parser_helpers import make_parser
from tests.unit.entrypoints.parsers.test_chat_templates import FAMILIES, check_parsed_calls, check_rendered_calls

OUTPUTS = {"llama3_json": '{"name": "f", "parameters": {"a": %s}}', "mistral": '[TOOL_CALLS]f[ARGS]{"a": %s}'}


@pytest.mark.parametrize("family", OUTPUTS)
def test_the_parser_and_the_template_of_a_family_agree(family):
    template, end = FAMILIES[family]
    check_rendered_calls(make_parser(family), template, end)
    check_parsed_calls(make_parser(family), template, OUTPUTS[family])
