"""The engine, the tokenizer threads and the prompt renderer that all request handlers of a process share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mvllm.config.encoder_limits import items_of
from mvllm.config.families import find_architecture
from mvllm.config.multimodal import DEFAULT_LIMIT
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.parsers.auto_detect import NO_PARSERS, ParserNames, resolve_parsers


@dataclass(frozen=True)
class ServingContext:
    """Shared by the request handlers of a server or of a batch.

    Attributes:
        engine: Runs the requests.
        tokenizer_pool: Threads for tokenizing and for encoding large responses.
        prompt_renderer: Turns conversations into prompts, and has the parsers of the model's output.
        force_include_usage: Whether every stream ends with the usage, also if the request does not ask for it.
    """

    engine: AsyncLLM
    tokenizer_pool: TokenizerPool
    prompt_renderer: ChatPromptRenderer
    force_include_usage: bool = False

    @classmethod
    def create(
        cls,
        engine: AsyncLLM,
        template_renderer: ChatTemplateRenderer,
        *,
        tool_call_parser: str,
        reasoning_parser: str,
        chat_template: str | None,
        default_template_variables: Mapping[str, Any] = MappingProxyType({}),
        trust_request_chat_template: bool = False,
        force_include_usage: bool = False,
    ) -> ServingContext:
        """The context of an engine.

        Args:
            template_renderer: Process that renders the model's chat template. The caller closes it.
            tool_call_parser, reasoning_parser: A parser's name, `auto` to detect it from the chat template, or `none`.
            chat_template: Template in place of the tokenizer's own.
            default_template_variables: Variables of the template for requests that do not set them.
            trust_request_chat_template: Whether requests may send templates.
            force_include_usage: See the attribute.

        Raises:
            ConfigError: No parser has the name.
        """
        pool = TokenizerPool(engine.tokenizer, engine.model_config.max_model_len, template_renderer)
        folder = Path(engine.model_config.tokenizer or "")
        family = find_architecture(engine.model_config.architecture)
        usual = NO_PARSERS if family is None else ParserNames(family.tool_parser, family.reasoning_parser)
        parsers = resolve_parsers(tool_call_parser, reasoning_parser, chat_template, folder, usual)
        renderer = ChatPromptRenderer(
            engine,
            pool,
            chat_template=chat_template,
            default_template_variables=default_template_variables,
            trust_request_chat_template=trust_request_chat_template,
            tool_parser=parsers.tool,
            reasoning_parser=parsers.reasoning,
        )
        return cls(engine, pool, renderer, force_include_usage)

    @property
    def modalities(self) -> frozenset[str]:
        """What prompts may have besides text: `image`, `audio`, `video`."""
        config = self.engine.config
        takes, limits = items_of(config), config.multimodal.limit_per_prompt
        found = () if takes is None else takes.modalities
        return frozenset(each for each in found if limits.get(each, DEFAULT_LIMIT))

    def close(self) -> None:
        """Ends the threads when their current work is done."""
        self.tokenizer_pool.close()
