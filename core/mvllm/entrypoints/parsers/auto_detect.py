"""Detects the tool call parser and the reasoning parser of a model from its chat template.

A template contains the model's format in the instructions for tool calls and where it renders earlier calls. A rule
requires patterns of one format and excludes patterns of others, since formats share markers: Qwen3-Coder and GLM write
`<tool_call>` around text that is not JSON. If no rule matches, or several for different parsers, none is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mvllm.entrypoints.parsers.registry import reasoning_parser_names, tool_parser_names
from mvllm.logging import get_logger

logger = get_logger(__name__)

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class DetectionRule:
    """Patterns by which a chat template shows a format.

    Attributes:
        parser: Name of the format's parser.
        shows: What the template shows, for the log.
        patterns: Regular expressions that must all match.
        excluded: Regular expressions of which none may match.
    """

    parser: str
    shows: str
    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    def applies(self, template: str) -> bool:
        """Whether the rule matches a template."""
        has = [re.search(pattern, template) is not None for pattern in self.patterns]
        return all(has) and not any(re.search(pattern, template) for pattern in self.excluded)


# A quote, which may be escaped in a template.
_Q = r"\\*\""

_JSON_IN_TAGS = rf"<tool_call>[^<>]{{0,40}}?\{{{_Q}(?:name|arguments){_Q}"
_PYTHON_LIST = r"\[func_name\w*\(param"
_LLAMA_JSON = rf"\{{{_Q}name{_Q}: function name, {_Q}parameters{_Q}: dictionary of argument name and its value"
_XML_FORMATS = ("<function=", "<parameter=", "<arg_key>", "<tool_sep>")
_OTHER_MARKERS = (r"<\|python_tag\|>", r"\[TOOL_CALLS\]", "<｜tool▁calls▁begin｜>", r"<\|tool_calls_section_begin\|>")

TOOL_RULES = (
    DetectionRule(
        "hermes",
        "JSON between <tool_call> tags",
        (_JSON_IN_TAGS, rf"{_Q}arguments{_Q}", "</tool_call>"),
        (*_XML_FORMATS, *_OTHER_MARKERS),
    ),
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
    DetectionRule("glm47", "<arg_key> directly behind the name", ("<tool_call>", r"\{function-name\}<arg_key>")),
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
_FAMILIES = (
    *("<answer>", "<response>", "<seed:think>", "<SPECIAL_1", "<｜Assistant｜>", "<｜hy_", r"\[gMASK\]", r"\]~b\]"),
    *(r"<\|im_middle\|>", r"<\|start_of_role\|>", r"\btruncate_history_thinking\b", _OLMO),
)
"""Signs of families with rules of their own."""

REASONING_RULES = (
    DetectionRule(
        "qwen3", "<think> and the switch enable_thinking", (r"\benable_thinking\b", "<think>", "</think>"), _FAMILIES
    ),
    DetectionRule(  # models that always reason
        "qwen3",
        "<think> at the end of the prompt",
        (r"<\|im_start\|>assistant(?:\\+n|\n)<think>", "</think>"),
        _FAMILIES,
    ),
    DetectionRule(
        "deepseek_r1",
        "<think> at the end of the prompt",
        (r"<｜Assistant｜><think>", "</think>"),
        (r"\benable_thinking\b", r"\bthinking\b", "<answer>"),
    ),
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


def find_rule(template: str, rules: tuple[DetectionRule, ...]) -> DetectionRule | None:
    """The first matching rule; None if no rule matches, or the matching rules name different parsers."""
    matching = [rule for rule in rules if rule.applies(template)]
    return matching[0] if len({rule.parser for rule in matching}) == 1 else None


def detect_format(template: str, rules: tuple[DetectionRule, ...]) -> str | None:
    """The parser of the matching rules; None if no rule matches, or the matching rules name different parsers."""
    rule = find_rule(template, rules)
    return None if rule is None else rule.parser


@dataclass(frozen=True)
class ParserNames:
    """Names of a server's parsers; None for no parser."""

    tool: str | None
    reasoning: str | None


NO_PARSERS = ParserNames(None, None)


def resolve_parsers(
    tool: str, reasoning: str, chat_template: str | None, folder: Path, family: ParserNames = NO_PARSERS
) -> ParserNames:
    """The parsers to use. Logs detected ones.

    Args:
        tool, reasoning: Parser names; `auto` to detect them from the template; `none` for no parser.
        chat_template: Template in place of the tokenizer's; None for the tokenizer's.
        folder: Folder of the tokenizer.
        family: The parsers of the model's family, for templates that show no known format.
    """

    from mvllm.entrypoints.chat_template import read_chat_template

    def choose(
        asked: str, rules: tuple[DetectionRule, ...], names: Callable[[], tuple[str, ...]], what: str, usual: str | None
    ) -> str | None:
        if asked != AUTO:
            return None if asked == NONE else asked
        template = chat_template or read_chat_template(folder, for_tools=rules is TOOL_RULES)
        rule = find_rule(template, rules) if template else None
        option = "--tool-call-parser" if rules is TOOL_RULES else "--reasoning-parser"
        shows_tools = bool(template and re.search(r"\btools\b", template))
        if rule is None and template and usual in names() and (shows_tools or rules is not TOOL_RULES):
            logger.info("%s %s: that of the model's family. %s none disables it.", what, usual, option)
            return usual
        if rule is None or rule.parser not in names():
            if shows_tools and rules is TOOL_RULES:
                logger.info(
                    "%s none: the chat template has tools, but does not show one known format of calls. Requests with "
                    "tools are rejected; %s chooses a format.",
                    what,
                    option,
                )
            return None
        logger.info(
            "%s %s: the chat template shows %s. %s none disables it, another name replaces it.",
            what,
            rule.parser,
            rule.shows,
            option,
        )
        return rule.parser

    return ParserNames(
        choose(tool, TOOL_RULES, tool_parser_names, "Tool call parser", family.tool),
        choose(reasoning, REASONING_RULES, reasoning_parser_names, "Reasoning parser", family.reasoning),
    )
