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
        patterns: Regular expressions that must all match.
        excluded: Regular expressions of which none may match.
    """

    parser: str
    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    def applies(self, template: str) -> bool:
        """Whether the rule matches a template."""
        has = [re.search(pattern, template) is not None for pattern in self.patterns]
        return all(has) and not any(re.search(pattern, template) for pattern in self.excluded)


# A quote, which may be escaped in a template.
_Q = r"\\*\""

TOOL_RULES = (
    DetectionRule(
        "hermes",
        (rf"<tool_call>[^<>]{{0,40}}?\{{{_Q}(?:name|arguments){_Q}", rf"{_Q}arguments{_Q}", "</tool_call>"),
        ("<function=", "<parameter=", "<arg_key>", "<tool_sep>", r"<\|python_tag\|>", r"\[TOOL_CALLS\]"),
    ),
    DetectionRule(
        "llama3_json",
        (
            r"<\|start_header_id\|>",
            rf"\{{{_Q}name{_Q}: function name, {_Q}parameters{_Q}: dictionary of argument name and its value",
        ),
        ("<tool_call>", "<function=", r"\[TOOL_CALLS\]"),
    ),
    DetectionRule("mistral", (r"\[TOOL_CALLS\]", r"\[AVAILABLE_TOOLS\]"), ("<tool_call>", r"<\|python_tag\|>")),
)

REASONING_RULES = (
    DetectionRule("qwen3", (r"\benable_thinking\b", "<think>", "</think>"), ("<answer>", "<｜Assistant｜>")),
    DetectionRule(
        "qwen3", (r"<\|im_start\|>assistant(?:\\+n|\n)<think>", "</think>"), ("<answer>",)
    ),  # models that always reason
    DetectionRule(
        "deepseek_r1", (r"<｜Assistant｜><think>", "</think>"), (r"\benable_thinking\b", r"\bthinking\b", "<answer>")
    ),
)


def detect_format(template: str, rules: tuple[DetectionRule, ...]) -> str | None:
    """The parser of the matching rules; None if no rule matches, or the matching rules name different parsers."""
    found = {rule.parser for rule in rules if rule.applies(template)}
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class ParserNames:
    """Names of a server's parsers; None for no parser."""

    tool: str | None
    reasoning: str | None


def resolve_parsers(tool: str, reasoning: str, chat_template: str | None, folder: Path) -> ParserNames:
    """The parsers to use. Logs detected ones.

    Args:
        tool, reasoning: Parser names; `auto` to detect them from the template; `none` for no parser.
        chat_template: Template in place of the tokenizer's; None for the tokenizer's.
        folder: Folder of the tokenizer.
    """

    from mvllm.entrypoints.chat_template import read_chat_template

    def choose(
        asked: str, rules: tuple[DetectionRule, ...], names: Callable[[], tuple[str, ...]], what: str
    ) -> str | None:
        if asked != AUTO:
            return None if asked == NONE else asked
        template = chat_template or read_chat_template(folder, for_tools=rules is TOOL_RULES)
        found = detect_format(template, rules) if template else None
        if found is None or found not in names():
            return None
        option = "--tool-call-parser" if rules is TOOL_RULES else "--reasoning-parser"
        logger.info("%s %s, detected from the chat template (%s none disables it).", what, found, option)
        return found

    return ParserNames(
        choose(tool, TOOL_RULES, tool_parser_names, "Tool call parser"),
        choose(reasoning, REASONING_RULES, reasoning_parser_names, "Reasoning parser"),
    )
