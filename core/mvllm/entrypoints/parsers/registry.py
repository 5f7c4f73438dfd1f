"""Registry of tool call parsers and reasoning parsers by name. Modules are imported on first use.

Other packages add parsers through entry points of `mvllm.tool_parsers` and `mvllm.reasoning_parsers`; an entry point's
value is `package.module:Class`, a ToolParser or a ReasoningParser. Core's own names take precedence.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mvllm import plugin_groups
from mvllm.entrypoints.parsers.interface import ReasoningParser, ToolParser
from mvllm.errors import ConfigError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_TOOLS = {
    "deepseek_v3": "mvllm.entrypoints.parsers.tools.deepseek_v3:DeepSeekV3ToolParser",
    "deepseek_v31": "mvllm.entrypoints.parsers.tools.deepseek_v31:DeepSeekV31ToolParser",
    "deepseek_v32": "mvllm.entrypoints.parsers.tools.deepseek_v32:DeepSeekV32ToolParser",
    "functiongemma": "mvllm.entrypoints.parsers.tools.functiongemma:FunctionGemmaToolParser",
    "gemma4": "mvllm.entrypoints.parsers.tools.gemma4:Gemma4ToolParser",
    "glm47": "mvllm.entrypoints.parsers.tools.glm47:Glm47ToolParser",
    "gpt_oss": "mvllm.entrypoints.parsers.tools.gpt_oss:GptOssToolParser",
    "granite": "mvllm.entrypoints.parsers.tools.granite:GraniteToolParser",
    "hermes": "mvllm.entrypoints.parsers.tools.hermes:HermesToolParser",
    "kimi_k2": "mvllm.entrypoints.parsers.tools.kimi_k2:KimiK2ToolParser",
    "llama3_json": "mvllm.entrypoints.parsers.tools.llama3_json:Llama3JsonToolParser",
    "llama4_pythonic": "mvllm.entrypoints.parsers.tools.llama4_pythonic:Llama4PythonicToolParser",
    "minimax_m2": "mvllm.entrypoints.parsers.tools.minimax_m2:MiniMaxM2ToolParser",
    "mistral": "mvllm.entrypoints.parsers.tools.mistral:MistralToolParser",
    "olmo3": "mvllm.entrypoints.parsers.tools.olmo3:Olmo3ToolParser",
    "phi4_mini": "mvllm.entrypoints.parsers.tools.phi4_mini:Phi4MiniToolParser",
    "pythonic": "mvllm.entrypoints.parsers.tools.pythonic:PythonicToolParser",
    "qwen3_coder": "mvllm.entrypoints.parsers.tools.qwen3_coder:Qwen3CoderToolParser",
}
_TOOL_ALIASES = {
    "glm45": "glm47",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4_mini",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
"""Other names of the same formats, among them those of other servers."""
_REASONING = {
    "deepseek_r1": "mvllm.entrypoints.parsers.reasoning.deepseek_r1:DeepSeekR1ReasoningParser",
    "deepseek_v3": "mvllm.entrypoints.parsers.reasoning.deepseek_v3:DeepSeekV3ReasoningParser",
    "ernie45": "mvllm.entrypoints.parsers.reasoning.ernie45:Ernie45ReasoningParser",
    "gemma4": "mvllm.entrypoints.parsers.reasoning.gemma4:Gemma4ReasoningParser",
    "glm45": "mvllm.entrypoints.parsers.reasoning.glm47:GLMReasoningParser",
    "glm47": "mvllm.entrypoints.parsers.reasoning.glm47:GLMReasoningParser",
    "gpt_oss": "mvllm.entrypoints.parsers.reasoning.gpt_oss:GptOssReasoningParser",
    "granite": "mvllm.entrypoints.parsers.reasoning.granite:GraniteReasoningParser",
    "hunyuan_a13b": "mvllm.entrypoints.parsers.reasoning.hunyuan_a13b:HunyuanA13BReasoningParser",
    "kimi_k2": "mvllm.entrypoints.parsers.reasoning.kimi_k2:KimiK2ReasoningParser",
    "minimax_m2": "mvllm.entrypoints.parsers.reasoning.minimax_m2:MiniMaxM2ReasoningParser",
    "minimax_m2_append_think": "mvllm.entrypoints.parsers.reasoning.minimax_m2:MiniMaxM2AppendThinkParser",
    "mistral": "mvllm.entrypoints.parsers.reasoning.mistral:MistralReasoningParser",
    "nemotron_v3": "mvllm.entrypoints.parsers.reasoning.nemotron_v3:NemotronReasoningParser",
    "olmo3": "mvllm.entrypoints.parsers.reasoning.olmo3:Olmo3ReasoningParser",
    "qwen3": "mvllm.entrypoints.parsers.reasoning.qwen3:Qwen3ReasoningParser",
    "seed_oss": "mvllm.entrypoints.parsers.reasoning.seed_oss:SeedOssReasoningParser",
}
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


def canonical_reasoning_parser(name: str) -> str:
    """The parser's own name for an alias, `-` as `_`; any other name unchanged."""
    plain = name.replace("-", "_")
    return plain if plain in _REASONING else _REASONING_ALIASES.get(plain, name)


def tool_parser_names() -> tuple[str, ...]:
    """Names of core's and installed plugins' tool parsers, sorted. Imports no parser."""
    return tuple(sorted({*_TOOLS, *_TOOL_ALIASES, *plugin_groups.allowed_names(plugin_groups.TOOL_PARSERS)}))


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
        _TOOLS | {alias: _TOOLS[meant] for alias, meant in _TOOL_ALIASES.items()},
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
        raise ConfigError(f"There is no {group.noun} {name!r}. Choose one of: {', '.join(names)}.")
    found = plugin_groups.load(group, plugin)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{plugin} must name a subclass of mvllm.extension_api.{kind.__name__}, found {found!r}.")
    return found
