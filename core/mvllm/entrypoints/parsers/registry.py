"""Registry of tool call parsers and reasoning parsers by name. Modules are imported on first use.

Core has the formats that several families share: JSON in `<tool_call>` tags, and reasoning in `<think>` tags. Other
packages, among them mvllm-parsers, add parsers through entry points of `mvllm.tool_parsers` and
`mvllm.reasoning_parsers`; an entry point's value is `package.module:Class`, a ToolParser or a ReasoningParser. Core's
own names take precedence.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mvllm import plugin_groups
from mvllm.entrypoints.parsers.interface import ReasoningParser, ToolParser
from mvllm.entrypoints.parsers.parser_rules import parser_rules
from mvllm.errors import ConfigError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_TOOLS = {"hermes": "mvllm.entrypoints.parsers.hermes:HermesToolParser"}
_REASONING = {
    "deepseek_r1": "mvllm.entrypoints.parsers.tagged_reasoning:DeepSeekR1ReasoningParser",
    "qwen3": "mvllm.entrypoints.parsers.tagged_reasoning:Qwen3ReasoningParser",
}


def canonical_reasoning_parser(name: str) -> str:
    """The parser's own name for an alias, `-` as `_`; any other name unchanged.

    Raises:
        ConfigError: An installed package's rules cannot be loaded.
    """
    plain = name.replace("-", "_")
    if plain in reasoning_parser_names():
        return plain
    aliases = (rules.reasoning_aliases for rules in parser_rules())
    return next((known[plain] for known in aliases if plain in known), name)


def tool_parser_names() -> tuple[str, ...]:
    """Names of core's and installed plugins' tool parsers, sorted. Imports no parser."""
    return tuple(sorted({*_TOOLS, *plugin_groups.allowed_names(plugin_groups.TOOL_PARSERS)}))


def reasoning_parser_names() -> tuple[str, ...]:
    """Names of core's and installed plugins' reasoning parsers, sorted. Imports no parser."""
    return tuple(sorted({*_REASONING, *plugin_groups.allowed_names(plugin_groups.REASONING_PARSERS)}))


def tool_parser(name: str) -> type[ToolParser]:
    """The tool parser with a name.

    Raises:
        ConfigError: No parser has the name (the message lists the names), or a plugin's parser is not allowed, cannot
            be loaded, or is not a ToolParser.
    """
    found: type[ToolParser] = _find(
        plugin_groups.TOOL_PARSERS,
        _TOOLS,
        name,
        ToolParser,
        tool_parser_names(),
    )
    return found


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The reasoning parser with a name or an alias.

    Raises:
        ConfigError: As for `tool_parser`.
    """
    found: type[ReasoningParser] = _find(
        plugin_groups.REASONING_PARSERS,
        _REASONING,
        canonical_reasoning_parser(name),
        ReasoningParser,
        reasoning_parser_names(),
    )
    return found


def _find(
    group: plugin_groups.PluginGroup, own: Mapping[str, str], name: str, kind: type, names: tuple[str, ...]
) -> Any:
    if name in own:
        for source in plugin_groups.list_plugins(group):
            if source.name == name:
                logger.warning("%s has the %s %s, a name of core: core's is used.", source, group.noun, name)
        module, _, attribute = own[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugin = plugin_groups.find(group, name)
    if plugin is None:
        raise ConfigError(
            f"There is no {group.noun} {name!r}. Choose one of: {', '.join(names)}."
            f"{plugin_groups.missing_part_of(group)}"
        )
    return plugin_groups.load_class(group, plugin, kind, kind.__name__)
