"""Tools, calls and results in rendered prompts, with templates in the formats of real models.

The templates are short, but read the same fields of the messages as the real ones. The parser of a family reads the
calls that its template renders.
"""

from __future__ import annotations

import json

import pytest

from mvllm.entrypoints.chat_template import render_chat
from mvllm.errors import RequestError
from tests.unit.engine.tokenizers import make_tokenizer
from tests.unit.entrypoints.parsers.parser_helpers import make_parser, without_ids

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA = """
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools is not none %}
            {%- for t in tools %}{{- (t | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """
{%- if tools is not none %}
    {{- '[AVAILABLE_TOOLS] [' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, val in tool.items() if key != 'return' %}
            {{- '"' + key + '": ' + (val | tojson) }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- '}}' + (']' if loop.last else ', ') }}
    {%- endfor %}
    {{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

FAMILIES = {"hermes": (QWEN, "<|im_end|>"), "llama3_json": (LLAMA, "<|eot_id|>"), "mistral": (MISTRAL, "<|end|>")}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = '{"city": "Köln", "days": [1, {"x": null}], "mark": "</tool_call>"}'


def render(template, messages, **options):
    return render_chat(make_tokenizer(), messages, chat_template=template, **options)


def conversation(*answers, **more):
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": args}} for id_, name, args in answers
    ]
    results = [{"role": "tool", "tool_call_id": id_, "content": f"result of {name}"} for id_, name, _ in answers]
    question = {"role": "user", "content": "Weather?"}
    return [question, {"role": "assistant", "content": None, "tool_calls": calls, **more}, *results]


def check_rendered_calls(parser, template, end):
    """The parser reads calls that the template renders."""
    call = ("abcdefgh1", "get_weather", ARGUMENTS)
    before = render(template, conversation()[:1])
    prompt = render(template, conversation(call), add_generation_prompt=False)
    turn = prompt.removeprefix(before.removesuffix("\n")).split(end)[0]
    content, [(name, arguments)], _ = without_ids(parser.parse(turn.split("assistant")[-1]))
    assert (content, name, json.loads(arguments)) == ("", "get_weather", json.loads(ARGUMENTS))
    assert "result of get_weather" in prompt


def check_parsed_calls(parser, template, text):
    """The template accepts calls that the parser finds in `text`, also if the model's arguments are not JSON."""
    for value in ("1", "oops"):
        [call] = parser.parse(text % value).tool_calls
        message = {"role": "assistant", "content": None, "tool_calls": [call.as_json()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        prompt = render(template, [{"role": "user", "content": "Hi"}, message, result])
        assert (value in prompt) == (value == "1") and "7" in prompt


def test_the_parser_and_the_template_of_one_family_agree():
    parser = make_parser("hermes")
    check_rendered_calls(parser, *FAMILIES["hermes"])
    check_parsed_calls(parser, QWEN, '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>')


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_the_prompt_contains_the_tools(self, family):
        prompt = render(FAMILIES[family][0], [{"role": "user", "content": "Hi"}], tools=[TOOL])
        for part in ("get_weather", "Weather in a <city>", '"required"'):
            assert part in prompt

    def test_without_tools_the_prompt_contains_none(self, family):
        for tools in (None, []):
            prompt = render(FAMILIES[family][0], [{"role": "user", "content": "Hi"}], tools=tools)
            assert "TOOLS" not in prompt.upper()

    def test_an_answer_without_calls_may_say_so(self, family):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "tool_calls": None}]
        for calls in (None, []):
            messages[1]["tool_calls"] = calls
            assert "Yes" in render(FAMILIES[family][0], messages, add_generation_prompt=False)


def test_parallel_calls_and_their_results():
    prompt = render(QWEN, conversation(("1", "f", "{}"), ("2", "g", '{"a": 1}'), content="I look."))
    assert 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"' in prompt
    assert "result of f\n</tool_response>\n<tool_response>\nresult of g" in prompt


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments):
    assert '"parameters": {}}' in render(LLAMA, conversation(("1", "f", arguments)))


@pytest.mark.parametrize("arguments", ["[1]", "oops", "[" * 100_000, "1" * 5000])
def test_arguments_that_are_not_an_object_stay_text(arguments):
    assert json.dumps(arguments) in render(LLAMA, conversation(("1", "f", arguments)))


def test_a_tools_result_may_come_in_parts():
    message = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12 °C"}]}
    assert "<tool_response>\n12 °C\n</tool_response>" in render(QWEN, [message])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_rendered_under_either_name(name):
    prompt = render(QWEN, [{"role": "assistant", "content": "4", name: "2+2"}], add_generation_prompt=False)
    assert "<think>\n2+2\n</think>\n\n4" in prompt


def test_the_prompt_decides_whether_the_output_starts_in_reasoning():
    parser = make_parser(None, "qwen3")
    hello = [{"role": "user", "content": "Hi"}]
    thinking = render(QWEN, hello)
    assert without_ids(parser.parse("<think>\nhm\n</think>\n\nHi", thinking)) == ("Hi", [], "hm")
    plain = render(QWEN, hello, chat_template_kwargs={"enable_thinking": False})
    assert without_ids(parser.parse("Hi </think>", plain)) == ("Hi </think>", [], None)


def test_documents_reach_the_template():
    template = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    hello, documents = [{"role": "user", "content": "Hi"}], [{"title": "A", "text": "b"}]
    assert render(template, hello, documents=documents) == "[A: b]Hi"
    assert render(template, hello, chat_template_kwargs={"documents": documents}) == "[A: b]Hi"
    with pytest.raises(RequestError, match="Pass documents once"):
        render(template, hello, documents=documents, chat_template_kwargs={"documents": documents})


def test_the_callers_messages_are_not_modified():
    messages = conversation(("1", "f", '{"a": 1}'), reasoning="x")
    before = json.dumps(messages)
    render(QWEN, messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([{"role": "assistant", "tool_calls": "x"}], {}, "tool_calls of message 0 must be a list; found 'x'"),
        ([{"role": "assistant", "tool_calls": [5]}], {}, "tool call without a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], {}, "tool call without a function"),
        ([{"role": "user", "content": "x"}], {"tools": [5]}, "tools must be a list of objects; found 5"),
        (
            [{"role": "user", "content": "x"}],
            {"tools": {"a": 1}},
            "tools must be a list of objects; found a dict of 1 items",
        ),
        ([{"role": "user", "content": "x"}], {"documents": "x"}, "documents must be a list of objects; found 'x'"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"padding": True}}, "may not set padding"),
    ],
)
def test_invalid_messages_are_rejected_by_name(messages, options, words):
    with pytest.raises(RequestError, match=words):
        render(QWEN, messages, **options)
