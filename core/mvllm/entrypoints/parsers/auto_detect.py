"""Detects the tool call parser and the reasoning parser of a model from its chat template (`parser_rules`).

If no rule matches, or several for different parsers, none is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mvllm import plugin_groups
from mvllm.entrypoints.parsers.parser_rules import DetectionRule, find_reasoning_rule, find_tool_rule
from mvllm.entrypoints.parsers.registry import reasoning_parser_names, tool_parser_names
from mvllm.logging import get_logger

logger = get_logger(__name__)

AUTO, NONE = "auto", "none"


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
        asked: str,
        find_rule: Callable[[str], DetectionRule | None],
        names: Callable[[], tuple[str, ...]],
        what: str,
        option: str,
        usual: str | None,
    ) -> str | None:
        if asked != AUTO:
            return None if asked == NONE else asked
        for_tools = find_rule is find_tool_rule
        template = chat_template or read_chat_template(folder, for_tools=for_tools)
        rule = find_rule(template) if template else None
        shows_tools = bool(template and re.search(r"\btools\b", template))
        if rule is None and template and usual in names() and (shows_tools or not for_tools):
            logger.info("%s %s: that of the model's family. %s none disables it.", what, usual, option)
            return usual
        if rule is None or rule.parser not in names():
            if shows_tools and for_tools:
                logger.info(
                    "%s none: the chat template has tools, but does not show one known format of calls. Requests with "
                    "tools are rejected; %s chooses a format.%s",
                    what,
                    option,
                    plugin_groups.missing_part_of(plugin_groups.TOOL_PARSERS),
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
        choose(tool, find_tool_rule, tool_parser_names, "Tool call parser", "--tool-call-parser", family.tool),
        choose(
            reasoning,
            find_reasoning_rule,
            reasoning_parser_names,
            "Reasoning parser",
            "--reasoning-parser",
            family.reasoning,
        ),
    )
