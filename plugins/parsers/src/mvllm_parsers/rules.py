"""How chat templates show the formats of this package, and further names of reasoning parsers. Imports no parser."""

from __future__ import annotations

from mvllm.extension_api.parsers import DetectionRule, ParserRules

# A quote, which may be escaped in a template.
_QUOTE = r"\\*\""

_JSON_IN_TAGS = rf"<tool_call>[^<>]{{0,40}}?\{{{_QUOTE}(?:name|arguments){_QUOTE}"
_PYTHON_LIST = r"\[func_name\w*\(param"
_LLAMA_JSON = (
    rf"\{{{_QUOTE}name{_QUOTE}: function name, {_QUOTE}parameters{_QUOTE}: dictionary of argument name and its value"
)
_XML_FORMATS = ("<function=", "<parameter=", "<arg_key>", "<tool_sep>")
_OTHER_MARKERS = (r"<\|python_tag\|>", r"\[TOOL_CALLS\]", "<｜tool▁calls▁begin｜>", r"<\|tool_calls_section_begin\|>")

_TOOLS = (
    DetectionRule(
        "llama3_json",
        "calls as JSON objects with name and parameters",
        (r"<\|start_header_id\|>", _LLAMA_JSON),
        ("<tool_call>", "<function=", r"\[TOOL_CALLS\]", _PYTHON_LIST),
    ),
    DetectionRule(
        "llama4_pythonic",
        "Llama 4's headers and calls in Python's syntax",
        (r"<\|header_start\|>", _PYTHON_LIST),
        (_LLAMA_JSON, "<tool_call>"),
    ),
    DetectionRule(
        "pythonic",
        "calls in Python's syntax",
        (r"<\|start_header_id\|>|<start_of_turn>", _PYTHON_LIST),
        (_LLAMA_JSON, "<tool_call>", "<function_calls>"),
    ),
    DetectionRule(
        "olmo3", "<function_calls> tags", ("<function_calls>", "<functions>"), ("DSML|dsml", "<invoke", "<tool_call>")
    ),
    DetectionRule(
        "mistral", "[TOOL_CALLS]", (r"\[TOOL_CALLS\]", r"\[AVAILABLE_TOOLS\]"), ("<tool_call>", r"<\|python_tag\|>")
    ),
    DetectionRule(
        "qwen3_coder",
        "<function=name> in <tool_call> tags",
        ("<tool_call>", "<function=", "<parameter="),
        (_JSON_IN_TAGS, "<arg_key>", *_OTHER_MARKERS),
    ),
    DetectionRule(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜> and code blocks of JSON",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
        ("DSML",),
    ),
    DetectionRule(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜> and plain JSON",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
        ("DSML", "```json"),
    ),
    DetectionRule(
        "deepseek_v32",
        "DSML function calls",
        ("｜DSML｜", "function_calls>", "invoke name="),
        (r"(?:｜DSML｜|dsml_token\s*\}\})tool_calls>",),
    ),
    DetectionRule(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        (r"<\|tool_calls_section_begin\|>", r"<\|tool_call_argument_begin\|>"),
    ),
    DetectionRule("glm47", "<arg_key> directly after the name", ("<tool_call>", r"\{function-name\}<arg_key>")),
    DetectionRule(
        "glm45",
        "<arg_key> tags in lines of their own",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        (r"\{function-name\}<arg_key>", "<function="),
    ),
    DetectionRule(
        "gpt_oss", "harmony channels", (r"<\|channel\|>(?:analysis|commentary)", r"<\|start\|>", r"functions\.")
    ),
    DetectionRule("granite", "<|tool_call|> and Granite's roles", (r"<\|tool_call\|>", r"<\|start_of_role\|>")),
    DetectionRule("gemma4", "<|tool_call>call:", (r"<\|tool_call>", r"<tool_call\|>")),
    DetectionRule("functiongemma", "<start_function_call>", ("<start_function_call>", "<end_function_call>")),
    DetectionRule("minimax_m2", "<minimax:tool_call>", ("<minimax:tool_call>", "<invoke name=")),
    DetectionRule("phi4_mini", "functools[...]", (r"functools\[", "arguments"), ("<tool_call>",)),
    DetectionRule(
        "phi4_mini", "<|tool|> and Phi's roles", (r"<\|tool\|>", r"<\|/tool\|>", r"<\|end\|>"), ("<tool_call>",)
    ),
)

_OLMO = r"\b(?:OLMo|Olmo)\b"
_THINKING_FORMATS = (
    *("<answer>", "<response>", "<seed:think>", "<SPECIAL_1", "<｜Assistant｜>", "<｜hy_", r"\[gMASK\]", r"\]~b\]"),
    *(r"<\|im_middle\|>", r"<\|start_of_role\|>", r"\btruncate_history_thinking\b", _OLMO),
)
"""Signs of formats that are not those of `<think>` tags alone."""

_REASONING = (
    DetectionRule(
        "deepseek_v3",
        "<think> or </think> at the end of the prompt, by the switch thinking",
        ("<｜Assistant｜>", "<think>", "</think>", r"\b(?:enable_)?thinking\b"),
        ("<answer>",),
    ),
    DetectionRule("kimi_k2", "<think> and Kimi's roles", (r"<\|im_middle\|>", "<think>", "</think>")),
    DetectionRule("glm45", "<think> and GLM's prefix", (r"\[gMASK\]", "<think>", "</think>")),
    DetectionRule("granite", "Here is my thought process:", (r"Here is my thought process:", r"Here is my response:")),
    DetectionRule("granite", "<think> and <response>", (r"<\|start_of_role\|>", "<think>", "<response>")),
    DetectionRule("minimax_m2", "<think> and MiniMax's roles", (r"\]~b\]ai", "<think>")),
    DetectionRule("mistral", "[THINK]", (r"\[THINK\]", r"\[/THINK\]")),
    DetectionRule("gemma4", "<|channel>", (r"<\|channel>", r"<channel\|>")),
    DetectionRule("olmo3", "<think> and OLMo's name", (_OLMO, r"<\|im_start\|>assistant(?:\\+n|\n)<think>")),
    DetectionRule(
        "nemotron_v3",
        "<think> and the switch truncate_history_thinking",
        (r"\btruncate_history_thinking\b", "<think>", "</think>"),
    ),
    DetectionRule("nemotron_v3", "<think> and Nemotron's roles", (r"<SPECIAL_1\d>Assistant", "<think>", "</think>")),
    DetectionRule("seed_oss", "<seed:think>", ("<seed:think>", "</seed:think>")),
    DetectionRule(
        "ernie45", "<think> and <response>", (r"<\|im_start\|>", "<think>", "</think>", "<response>"), (r"\]~b\]",)
    ),
    DetectionRule("hunyuan_a13b", "<think> and <answer>", (r"<\|extra_0\|>|<｜hy_Assistant｜>", "<think>", "<answer>")),
    DetectionRule("gpt_oss", "the channel analysis", (r"<\|channel\|>analysis", r"<\|start\|>")),
)

_REASONING_ALIASES = {
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v3",
    "glm": "glm45",
    "glm4_moe": "glm45",
    "holo2": "deepseek_r1",
    "intern_s1": "qwen3",
    "interns1": "qwen3",
    "kimi": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "mimo": "qwen3",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2_append_think",
    "nano_v3": "nemotron_v3",
    "nemotron": "nemotron_v3",
    "nemotron_3": "nemotron_v3",
    "openai_gptoss": "gpt_oss",
    "qwen3_thinking": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
    "super_v3": "nemotron_v3",
}
"""Names in other engines, and models whose format is that of another one."""

RULES = ParserRules(
    tools=_TOOLS,
    reasoning=_REASONING,
    tool_exclusions={"hermes": (*_XML_FORMATS, *_OTHER_MARKERS)},
    reasoning_exclusions={"qwen3": _THINKING_FORMATS, "deepseek_r1": ("<answer>",)},
    reasoning_aliases=_REASONING_ALIASES,
)
