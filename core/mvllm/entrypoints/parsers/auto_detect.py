"""Chooses the parsers of answers from the model's chat template, where it shows which format the model writes.

A template shows a model's format twice: in the instructions to call functions, and where it writes earlier calls. A
rule requires what is distinctive of one format, and excludes what belongs to another, since formats share markers:
Qwen3-Coder and GLM write `<tool_call>` around something that is no JSON. Where no rule applies, or several that name
different parsers, none is chosen.
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
    """When a template belongs to a format.

    Attributes:
        parser: What reads the format.
        patterns: All of them are in the template.
        excluded: None of them is.
    """

    parser: str
    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    def applies(self, template: str) -> bool:
        """Whether a template is of this format."""
        has = [re.search(pattern, template) is not None for pattern in self.patterns]
        return all(has) and not any(re.search(pattern, template) for pattern in self.excluded)


# In a template, quotes may be escaped, and a text may be put together from several pieces.
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
    ),  # it always thinks
    DetectionRule(
        "deepseek_r1", (r"<｜Assistant｜><think>", "</think>"), (r"\benable_thinking\b", r"\bthinking\b", "<answer>")
    ),
)


def detect_format(template: str, rules: tuple[DetectionRule, ...]) -> str | None:
    """The parser of the rules that apply; None where none applies, or those that do name several."""
    found = {rule.parser for rule in rules if rule.applies(template)}
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class ParserNames:
    """Names of the parsers of a server; None for none."""

    tool: str | None
    reasoning: str | None


def resolve_parsers(tool: str, reasoning: str, chat_template: str | None, folder: Path) -> ParserNames:
    """The parsers to use. Logs what the template decided.

    Args:
        tool, reasoning: Names, or `auto` to look at the template, or `none`.
        chat_template: Template in place of the tokenizer's own.
        folder: Of the tokenizer.
    """

    from mvllm.entrypoints.chat_template import read_template_files

    def choose(
        asked: str, rules: tuple[DetectionRule, ...], names: Callable[[], tuple[str, ...]], what: str
    ) -> str | None:
        if asked != AUTO:
            return None if asked == NONE else asked
        template = chat_template or read_template_files(folder, for_tools=rules is TOOL_RULES)[0]
        found = detect_format(template, rules) if template else None
        if found is None or found not in names():
            return None
        option = "--tool-call-parser" if rules is TOOL_RULES else "--reasoning-parser"
        logger.info("%s %s, as the chat template shows its format (%s none for none).", what, found, option)
        return found

    return ParserNames(
        choose(tool, TOOL_RULES, tool_parser_names, "Tool call parser"),
        choose(reasoning, REASONING_RULES, reasoning_parser_names, "Reasoning parser"),
    )
