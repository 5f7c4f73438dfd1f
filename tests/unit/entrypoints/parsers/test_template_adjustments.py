"""Conversations that a template cannot render as clients send them."""

from __future__ import annotations

import json

import pytest

from mvllm.entrypoints.chat_template import render_chat
from mvllm.errors import RequestError
from tests.unit.engine.tokenizers import make_tokenizer

# As in gpt-oss: only the first call is rendered; functions need descriptions; content and reasoning exclude each other.
FIRST_CALL = """
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + tool.function.name + '\\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.content and message.reasoning_content %}
            {{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
        {%- endif %}
        {{- message.reasoning_content or '' }}
        {%- set call = message.tool_calls[0] %}
        {{- '<call ' + call.function.name + '>' }}
    {%- else %}
        {{- '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}"""
NINE = """
{%- for message in messages %}{%- for call in message.tool_calls or [] %}
    {%- if call.id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
    {%- endif %}{{- call.id }}
{%- endfor %}{{- '|' + (message.tool_call_id or '') }}{%- endfor %}"""


def render(template, messages, **options):
    return render_chat(make_tokenizer(), messages, chat_template=template, add_generation_prompt=False, **options)


def conversation(*names, results, **more):
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    answers = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in results]
    return [{"role": "assistant", "content": None, "tool_calls": calls, **more}, *answers]


def test_parallel_calls_are_rendered_one_by_one_with_their_results():
    messages = conversation("a", "b", "c", results=("b", "a", "x"))
    assert render(FIRST_CALL, messages) == "<call a><tool>of a<call b><tool>of b<call c><tool>of x"
    assert render(FIRST_CALL, conversation("a", results=("a",))) == "<call a><tool>of a"


def test_a_template_that_refuses_several_calls_gets_them_one_by_one():
    refuses = "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('This model only supports "
    refuses += "single tool-calls at once!') }}{% endif %}{{ m.role }} {% endfor %}"
    assert render(refuses, conversation("a", "b", results=("a", "b"))) == "assistant tool assistant tool "


def test_a_function_without_a_description_has_an_empty_one():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert render(FIRST_CALL, [{"role": "user", "content": "Hi"}], tools=tools) == "// f\n<user>Hi"


def test_content_beside_a_call_joins_the_reasoning_where_both_are_refused():
    messages = conversation("a", results=(), reasoning="Hm.")
    messages[0]["content"] = "I look."
    assert render(FIRST_CALL, messages) == "Hm.\nI look.<call a>"


def test_ids_of_other_servers_are_shortened_where_nine_characters_are_required():
    first, _, second = render(NINE, conversation("call_0123456789", results=("call_0123456789",))).partition("|")
    assert len(first) == 9 and first.isalnum() and second == "|" + first
    assert render(NINE, conversation("abcdefgh1", results=())) == "abcdefgh1|"


TEMPLATES = [("{{ messages[0].role }}", "system"), ("{{ 'developer' }}", "developer")]


@pytest.mark.parametrize(("template", "role"), TEMPLATES)
def test_a_developer_is_the_system_for_templates_without_that_role(template, role):
    assert render(template, [{"role": "developer", "content": "Be brief."}]) == role


def test_an_answer_without_content_is_empty():
    message = {"role": "assistant", "content": None, "refusal": None}
    assert render("{{ '<' + messages[0].content + '>' }}", [message]) == "<>"


def test_other_failures_are_reported_and_messages_are_not_modified():
    messages = conversation("a", "b", results=("a",))
    before = json.dumps(messages)
    with pytest.raises(RequestError, match="no attribute 'description'"):
        render(
            "{{ tools[0].function.parameters.description + '' }}", messages, tools=[{"function": {"parameters": {}}}]
        )
    render(FIRST_CALL, messages)
    assert json.dumps(messages) == before
