"""The formats that chat templates show."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mvllm.entrypoints.parsers.parser_rules import find_reasoning_rule, find_tool_rule
from mvllm.entrypoints.parsers.registry import reasoning_parser_names, tool_parser_names
from mvllm_parsers.rules import RULES

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
GRANITE_3 = GRANITE + r"""{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}"""
GRANITE_4 = QWEN.replace("<|im_end|>", "<|end_of_text|>") + r"""{{- '<|start_of_role|>assistant<|end_of_role|>' }}"""
LLAMA_32_PYTHONIC = r"""<|start_header_id|>
{{- "you MUST put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]\n" }}"""
OLMO = r"""{{- " <functions>" + (tools | tojson) + "</functions>" }}
{{- "<|im_start|>assistant\n" + '<function_calls>' + message['function_calls'] + '</function_calls>' }}"""
DEEPSEEK_V3 = r"""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name
+ '\n' + '```json' + '\n' + arguments + '\n' + '```' + '<｜tool▁call▁end｜>'}}"""
DEEPSEEK_V31 = r"""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'
+ tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}"""
DEEPSEEK_V32 = r"""{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}function_calls>
<{{ dsml_token }}invoke name="$FUNCTION_NAME">"""
DEEPSEEK_V4 = DEEPSEEK_V32 + "<{{ dsml_token }}tool_calls>"
KIMI = r"""<|tool_calls_section_begin|>
<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>"""
GLM_47 = r"""<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"""
HARMONY = r"""{{- "<|start|>assistant to=" + "functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}"""
GEMMA_4 = r"""{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}"""
FUNCTION_GEMMA = r"""{{ '<start_function_call>call:' + name + '{' }}{{ '}<end_function_call>' }}"""
MINIMAX = r"""{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{- '<invoke name="' + tool_call.name + '">' }}"""
PHI_4 = r"""{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"""
PHI_4_TOOLS = (
    r"""  * in a single JSON list formatted as functools[{"name": [name], "arguments": [arguments as JSON]}, ...]"""
)
SEED = r"""{%- set toolcall_begin_token = "<seed:tool_call>" -%}<function=example>\n<parameter=a>1</parameter>"""
NANO_V2 = r"""{{- '<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}, ' -}}"""

QWEN3_THINKS = r"""{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"""
ALWAYS_THINKS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n<think>\n' }}"""
R1 = r"""{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\n'}}"""
V31 = r"""{% if thinking %}{{'<｜Assistant｜><think>'}}{% else %}{{'<｜Assistant｜></think>'}}{% endif %}"""
V32 = (
    r"""{%- set start = "<think>" -%}{%- set end = "</think>" -%}<｜Assistant｜>{%- if enable_thinking -%}{{ start }}"""
)
DROPS_THOUGHTS = r"""{%- set content = content.split('</think>')[-1] %}{{- '<|im_start|>assistant\n' }}"""
KIMI_THINKS = r"""<|im_assistant|>assistant<|im_middle|><think>{{rc}}</think>{{render_content(message)}}"""
GLM_THINKS = r"""[gMASK]<sop><|assistant|>
{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}"""
GRANITE_32 = (
    r"""Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'"""
)
GRANITE_33 = (
    r"""<|start_of_role|>Write your thoughts between <think></think> and the response in <response></response>"""
)
MINIMAX_THINKS = r"""{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}{{- '\n<response>' }}"""
MAGISTRAL = r"""Your thinking process must follow the template below:[THINK]Your thoughts.[/THINK]"""
GEMMA_THINKS = (
    r"""{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\n<channel|>' -}}{%- endif -%}"""
)
OLMO_THINKS = r"""You are OLMo, a helpful AI assistant built by Ai2.{{ '<|im_start|>assistant\n<think>' }}</think>"""
NANO_3_THINKS = r"""{%- set truncate_history_thinking = true %}{%- if enable_thinking %}
{{- '<|im_start|>assistant\n<think>\n' }}{%- else %}{{- '<|im_start|>assistant\n<think></think>' }}{%- endif %}"""
NANO_V2_THINKS = r"""{{- '<SPECIAL_11>Assistant\n' -}}{%- if ns.enable_thinking is false -%}{{- '<think></think>' -}}"""
SEED_THINKS = r"""{%- set think_begin_token = "<seed:think>" -%}{%- set think_end_token = "</seed:think>" -%}"""
ERNIE_THINKS = r"""{{- '<|im_start|>assistant\n<think>\n' }}</think><response>\n</response>"""
HUNYUAN_THINKS = r"""<|extra_0|>{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n' }}{% endif %}<answer>"""


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN, "hermes"),
        (HERMES, "hermes"),
        (GRANITE_4, "hermes"),
        (LLAMA_31, "llama3_json"),
        (LLAMA_32, "llama3_json"),
        (LLAMA_32_PYTHONIC, "pythonic"),
        (LLAMA_4, "llama4_pythonic"),
        (OLMO, "olmo3"),
        (MISTRAL, "mistral"),
        (QWEN_CODER, "qwen3_coder"),
        (DEEPSEEK_V3, "deepseek_v3"),
        (DEEPSEEK_V31, "deepseek_v31"),
        (DEEPSEEK_V32, "deepseek_v32"),
        (KIMI, "kimi_k2"),
        (GLM, "glm45"),
        (GLM_47, "glm47"),
        (HARMONY, "gpt_oss"),
        (GRANITE_3, "granite"),
        (GEMMA_4, "gemma4"),
        (FUNCTION_GEMMA, "functiongemma"),
        (MINIMAX, "minimax_m2"),
        (PHI_4, "phi4_mini"),
        (PHI_4_TOOLS, "phi4_mini"),
        # Formats without a parser, some with the markers of other formats.
        (GRANITE, None),
        (CHATML, None),
        (DEEPSEEK_V4, None),
        (SEED, None),
        (NANO_V2, None),
        # Two formats in one template.
        (QWEN_BOTH, None),
        (QWEN + MISTRAL, None),
        (LLAMA_31 + HERMES, None),
        (LLAMA_32 + LLAMA_32_PYTHONIC, None),
        (KIMI + GLM, None),
    ],
)
def test_a_tool_parser_is_detected_for_unambiguous_templates(template: str, parser: str | None) -> None:
    rule = find_tool_rule(template)
    assert (rule and rule.parser) == parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN3_THINKS, "qwen3"),
        (ALWAYS_THINKS, "qwen3"),
        (QWEN3_THINKS + ALWAYS_THINKS, "qwen3"),
        (R1, "deepseek_r1"),
        (V31, "deepseek_v3"),
        (V32, "deepseek_v3"),
        (KIMI_THINKS, "kimi_k2"),
        (GLM_THINKS, "glm45"),
        (GRANITE_32, "granite"),
        (GRANITE_33, "granite"),
        (MINIMAX_THINKS, "minimax_m2"),
        (MAGISTRAL, "mistral"),
        (GEMMA_THINKS, "gemma4"),
        (OLMO_THINKS, "olmo3"),
        (NANO_3_THINKS, "nemotron_v3"),
        (NANO_V2_THINKS, "nemotron_v3"),
        (SEED_THINKS, "seed_oss"),
        (ERNIE_THINKS, "ernie45"),
        (HUNYUAN_THINKS, "hunyuan_a13b"),
        (HARMONY, "gpt_oss"),
        (DROPS_THOUGHTS, None),  # removes the reasoning of earlier messages, and has none itself
        (QWEN, None),
        (QWEN3_THINKS + MAGISTRAL, None),
    ],
)
def test_a_reasoning_parser_is_detected_for_unambiguous_templates(template: str, parser: str | None) -> None:
    rule = find_reasoning_rule(template)
    assert (rule and rule.parser) == parser


def test_rules_and_aliases_name_parsers() -> None:
    assert {rule.parser for rule in RULES.tools} | set(RULES.tool_exclusions) <= set(tool_parser_names())
    named = {rule.parser for rule in RULES.reasoning} | set(RULES.reasoning_exclusions)
    assert named | set(RULES.reasoning_aliases.values()) <= set(reasoning_parser_names())
    assert not set(RULES.reasoning_aliases) & set(reasoning_parser_names())


def test_detection_imports_no_parser() -> None:
    program = (
        "import sys\nfrom mvllm.entrypoints.parsers.parser_rules import find_tool_rule\n"
        "assert find_tool_rule('<minimax:tool_call><invoke name=').parser == 'minimax_m2'\n"
        "print(*sorted(name for name in sys.modules if name.startswith('mvllm_parsers')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.split() == ["mvllm_parsers", "mvllm_parsers.rules"]
