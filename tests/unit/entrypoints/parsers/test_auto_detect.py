"""Detection of parsers from chat templates."""

from __future__ import annotations

import logging

import pytest

from mvllm.entrypoints.parsers.auto_detect import (
    REASONING_RULES,
    TOOL_RULES,
    ParserNames,
    detect_format,
    resolve_parsers,
)

# Short templates like those of the families, with their distinctive parts.
QWEN = r"""{{- "Within <tool_call></tool_call>:\n
<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}"""
HERMES = r"""{{- "<tool_call>\n" }}
{{- '{"arguments": <args-dict>, "name": <function-name>}\n' }}
{{- '</tool_call><|im_end|>' }}"""
QWEN_CODER = r"""{{- 'Reply with\n\n<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n' }}
{{- '</function>\n</tool_call>' }}"""
QWEN_BOTH = QWEN + QWEN_CODER
GLM = r"""<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>"""
LLAMA_32 = r"""<|start_header_id|>
{{- 'As {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
LLAMA_31 = LLAMA_32 + r"""{{- "<|python_tag|>" + call.name }}"""
LLAMA_4 = r"""<|header_start|>{{- 'Respond with [func_name(params_name1=params_value1)]' }}<|python_start|>"""
MISTRAL = r"""{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}{{- call.function|tojson }}"""
GRANITE = r"""{{- '<|tool_call|>[{"name": "' + call.name + '", "arguments": ' }}"""
CHATML = r"""{{- '<|im_start|>' + message['role'] }}{%- if tools %}{{- tools | tojson }}{% endif %}"""

QWEN3_THINKS = r"""{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"""
ALWAYS_THINKS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n<think>\n' }}"""
R1 = r"""{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\n'}}"""
V31 = r"""{% if thinking %}{{'<｜Assistant｜><think>'}}{% else %}{{'<｜Assistant｜></think>'}}{% endif %}"""
DROPS_THOUGHTS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n' }}"""


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN, "hermes"),
        (HERMES, "hermes"),
        (LLAMA_31, "llama3_json"),
        (LLAMA_32, "llama3_json"),
        (MISTRAL, "mistral"),
        # Formats without a parser, some with the markers of other formats.
        (QWEN_CODER, None),
        (QWEN_BOTH, None),
        (GLM, None),
        (LLAMA_4, None),
        (GRANITE, None),
        (CHATML, None),
        # Two formats in one template.
        (QWEN + MISTRAL, None),
        (LLAMA_31 + HERMES, None),
    ],
)
def test_a_tool_parser_is_detected_for_unambiguous_templates(template: str, parser: str | None) -> None:
    assert detect_format(template, TOOL_RULES) == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN3_THINKS, "qwen3"),
        (ALWAYS_THINKS, "qwen3"),
        (QWEN3_THINKS + ALWAYS_THINKS, "qwen3"),
        (R1, "deepseek_r1"),
        (V31, None),
        (DROPS_THOUGHTS, None),  # removes the reasoning of earlier messages, and has none itself
        (QWEN, None),
    ],
)
def test_a_reasoning_parser_is_detected_for_unambiguous_templates(template: str, parser: str | None) -> None:
    assert detect_format(template, REASONING_RULES) == parser


def test_the_choice_is_logged_and_can_be_made_or_switched_off(tmp_path, caplog) -> None:
    (tmp_path / "chat_template.jinja").write_text(QWEN + QWEN3_THINKS, encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="mvllm"):
        assert resolve_parsers("auto", "auto", None, tmp_path) == ParserNames("hermes", "qwen3")
    tool, reasoning = caplog.messages
    assert "hermes" in tool and "--tool-call-parser none" in tool
    assert "qwen3" in reasoning and "--reasoning-parser none" in reasoning
    assert resolve_parsers("none", "none", None, tmp_path) == ParserNames(None, None)
    assert resolve_parsers("mistral", "deepseek_r1", None, tmp_path) == ParserNames("mistral", "deepseek_r1")
    assert resolve_parsers("auto", "auto", CHATML, tmp_path) == ParserNames(
        None, None
    )  # replaces the tokenizer's template
