"""Parsers by the names that users type. A parser's module is imported when it is asked for.

Other packages add parsers through entry points of `mvllm.tool_parsers` and `mvllm.reasoning_parsers`: the name is what
users type, the value `package.module:Class`, a ToolParser or a ReasoningParser. A name that core has itself is core's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mvllm.entrypoints.parsers.interface import ReasoningParser, ToolParser
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.platform import plugin_groups

logger = get_logger(__name__)

_TOOLS = {
    "hermes": "mvllm.entrypoints.parsers.tools.hermes:HermesToolParser",
    "llama3_json": "mvllm.entrypoints.parsers.tools.llama3_json:Llama3JsonToolParser",
    "mistral": "mvllm.entrypoints.parsers.tools.mistral:MistralToolParser",
}
_REASONING = {
    "deepseek_r1": "mvllm.entrypoints.parsers.reasoning.deepseek_r1:DeepSeekR1ReasoningParser",
    "qwen3": "mvllm.entrypoints.parsers.reasoning.qwen3:Qwen3ReasoningParser",
}


def tool_parser_names() -> tuple[str, ...]:
    """Names that `tool_parser` takes, sorted: core's and those of installed plugins. Imports nothing."""
    return tuple(sorted({*_TOOLS, *plugin_groups.allowed_names(plugin_groups.TOOL_PARSERS)}))


def reasoning_parser_names() -> tuple[str, ...]:
    """Names that `reasoning_parser` takes, sorted: core's and those of installed plugins. Imports nothing."""
    return tuple(sorted({*_REASONING, *plugin_groups.allowed_names(plugin_groups.REASONING_PARSERS)}))


def tool_parser(name: str) -> type[ToolParser]:
    """The tool parser of a name.

    Raises:
        ConfigError: There is none, and the message lists those there are; or a plugin's is not let in, cannot be
            loaded, or is no ToolParser.
    """
    found: type[ToolParser] = _find(plugin_groups.TOOL_PARSERS, _TOOLS, name, ToolParser, tool_parser_names())
    return found


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The reasoning parser of a name.

    Raises:
        ConfigError: As for `tool_parser`.
    """
    found: type[ReasoningParser] = _find(
        plugin_groups.REASONING_PARSERS, _REASONING, name, ReasoningParser, reasoning_parser_names()
    )
    return found


def _find(
    door: plugin_groups.PluginGroup, own: Mapping[str, str], name: str, kind: type, names: tuple[str, ...]
) -> Any:
    if name in own:
        for rival in plugin_groups.list_plugins(door):
            if rival.name == name:
                logger.warning("%s offers the %s %s, which core has itself: core's runs.", rival, door.noun, name)
        module, _, attribute = own[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    source = plugin_groups.find(door, name)
    if source is None:
        raise ConfigError(f"There is no {door.noun} {name!r}. There are: {', '.join(names)}.")
    found = plugin_groups.load(door, source)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{source} must name a subclass of mvllm.extension_api.{kind.__name__}, found {found!r}.")
    return found
