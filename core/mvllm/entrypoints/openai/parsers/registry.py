"""The parsers by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.entrypoints.openai.parsers.interface import Parser
from mvllm.entrypoints.openai.parsers.reasoning import make_deepseek_r1, make_qwen3
from mvllm.entrypoints.openai.parsers.tools import HermesParser, Llama3JsonParser, MistralParser

TOOL_PARSERS: dict[str, type[Parser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
REASONING_PARSERS: dict[str, Callable[[str], Parser]] = {"qwen3": make_qwen3, "deepseek_r1": make_deepseek_r1}
"""Each makes a parser of the answer to a prompt."""
