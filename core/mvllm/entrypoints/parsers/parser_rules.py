"""How chat templates show the formats that parsers read.

A template contains the model's format in the instructions for tool calls and where it renders earlier calls. A rule
requires patterns of one format and excludes patterns of others, since formats share markers. Packages add their rules
through entry points of `mvllm.parser_rules`; an entry point's value names a `ParserRules`, in a module that imports no
parser.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mvllm import plugin_groups
from mvllm.errors import ConfigError


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


@dataclass(frozen=True)
class ParserRules:
    """What a package says of its parsers before one of them is imported.

    Attributes:
        tools: Rules of tool parsers.
        reasoning: Rules of reasoning parsers.
        tool_exclusions: By tool parser, of any package: regular expressions of templates that are not in its format,
            although one of its rules matches.
        reasoning_exclusions: The same by reasoning parser.
        reasoning_aliases: Further names of reasoning parsers, with `_` for `-`, and the parsers' own names.
    """

    tools: tuple[DetectionRule, ...] = ()
    reasoning: tuple[DetectionRule, ...] = ()
    tool_exclusions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reasoning_exclusions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reasoning_aliases: Mapping[str, str] = field(default_factory=dict)


# A quote, which may be escaped in a template.
_QUOTE = r"\\*\""

_JSON_IN_TAGS = rf"<tool_call>[^<>]{{0,40}}?\{{{_QUOTE}(?:name|arguments){_QUOTE}"
_PROMPT_OPENS_THINKING = r"<\|im_start\|>assistant(?:\\+n|\n)<think>"
_OWN = ParserRules(
    tools=(
        DetectionRule(
            "hermes",
            "JSON between <tool_call> tags",
            (_JSON_IN_TAGS, rf"{_QUOTE}arguments{_QUOTE}", "</tool_call>"),
        ),
    ),
    reasoning=(
        DetectionRule(
            "qwen3",
            "<think> and the switch enable_thinking",
            (r"\benable_thinking\b", "<think>", "</think>"),
            ("<｜Assistant｜>",),
        ),
        DetectionRule(  # models that always reason
            "qwen3", "<think> at the end of the prompt", (_PROMPT_OPENS_THINKING, "</think>"), ("<｜Assistant｜>",)
        ),
        DetectionRule(
            "deepseek_r1",
            "<think> at the end of the prompt",
            (r"<｜Assistant｜><think>", "</think>"),
            (r"\benable_thinking\b", r"\bthinking\b"),
        ),
    ),
)


def parser_rules() -> tuple[ParserRules, ...]:
    """The rules of core's parsers, and those of installed packages.

    Raises:
        ConfigError: A package's rules cannot be loaded, or are no ParserRules.
    """
    found = [_OWN]
    for source in plugin_groups.list_plugins(plugin_groups.PARSER_RULES):
        if not plugin_groups.is_allowed(source):
            continue
        rules = plugin_groups.load(plugin_groups.PARSER_RULES, source)
        if not isinstance(rules, ParserRules):
            raise ConfigError(f"{source} must name a mvllm.extension_api.parsers.ParserRules, found {rules!r}.")
        found.append(rules)
    return tuple(found)


def find_tool_rule(template: str) -> DetectionRule | None:
    """The first matching rule of a tool parser; None if no rule matches, or matching rules name different parsers."""
    packages = parser_rules()
    return _find(template, [p.tools for p in packages], [p.tool_exclusions for p in packages])


def find_reasoning_rule(template: str) -> DetectionRule | None:
    """The first matching rule of a reasoning parser; None as in `find_tool_rule`."""
    packages = parser_rules()
    return _find(template, [p.reasoning for p in packages], [p.reasoning_exclusions for p in packages])


def _find(
    template: str, rules: Sequence[tuple[DetectionRule, ...]], exclusions: Sequence[Mapping[str, tuple[str, ...]]]
) -> DetectionRule | None:
    def is_excluded(parser: str) -> bool:
        patterns = itertools.chain.from_iterable(each.get(parser, ()) for each in exclusions)
        return any(re.search(pattern, template) for pattern in patterns)

    matching = [rule for rule in itertools.chain.from_iterable(rules) if rule.applies(template)]
    matching = [rule for rule in matching if not is_excluded(rule.parser)]
    return matching[0] if len({rule.parser for rule in matching}) == 1 else None
