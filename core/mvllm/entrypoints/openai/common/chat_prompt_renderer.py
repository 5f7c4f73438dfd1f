"""Turns the conversation of a request into a prompt: the chat template, rendered and tokenized within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.input_processor import check_num_chars_to_truncate
from mvllm.engine.frontend.prompt_items import refuse_truncation
from mvllm.entrypoints.chat_items import Items, num_rendered_chars, placeholder_texts, rendered_prompt, take_items
from mvllm.entrypoints.chat_template import NO_CHAT_TEMPLATE, RENDERED_SETTINGS
from mvllm.entrypoints.openai.common.errors import renamed_fields
from mvllm.entrypoints.openai.common.tokenizer_pool import MAX_TEMPLATE_LENGTH, TokenizerPool
from mvllm.entrypoints.openai.protocol import (
    REASONING_EFFORTS,
    ChatCompletionRequest,
    InputListRequest,
    TokenizeRequest,
)
from mvllm.entrypoints.parsers.registry import reasoning_parser as find_reasoning_parser
from mvllm.entrypoints.parsers.registry import tool_parser as find_tool_parser
from mvllm.entrypoints.typed_placeholders import TypedPlaceholders
from mvllm.errors import RequestError
from mvllm.messages.inputs import ExpandedPrompt, TextPrompt, TokensPrompt

MAX_TRUNCATED_MESSAGES = 1 << 16
"""Messages and tool calls of a conversation whose prompt is truncated; any other has fewer than max_model_len."""

MAX_TOOLS = 4096
MAX_TEMPLATE_VARIABLES = 256

_THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables by which chat templates switch the reasoning on and off; each template knows one of them."""


_WITHOUT_TEMPLATE = (
    "Start the server with --chat-template, or send a whole prompt to a route without messages, such as "
    "/v1/completions."
)
_ITEM_FIELDS = {"multi_modal_data": "messages", "prompt": "messages"}
"""Errors of items name the field that has them."""

ConversationRequest = ChatCompletionRequest | TokenizeRequest | InputListRequest
"""Requests with `messages`."""


class ChatPromptRenderer:
    """Turns conversations into prompts, and has the parsers of the model's output.

    Args:
        engine: The engine that runs the prompts.
        tokenizer_pool: Renders templates and tokenizes.
        chat_template: Template in place of the tokenizer's own, from the server's settings.
        trust_request_chat_template: Whether requests may send their own.
        tool_parser, reasoning_parser: Names of the parsers; None for none.

    Attributes:
        tool_parser, reasoning_parser: Classes of the parsers.
        special_tokens: Texts of the tokenizer's special tokens.

    Raises:
        ConfigError: No parser has the name.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer_pool: TokenizerPool,
        *,
        chat_template: str | None = None,
        default_template_variables: Mapping[str, Any] = MappingProxyType({}),
        trust_request_chat_template: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self.tool_parser = find_tool_parser(tool_parser) if tool_parser is not None else None
        self.reasoning_parser = find_reasoning_parser(reasoning_parser) if reasoning_parser is not None else None
        self.special_tokens = frozenset(map(engine.tokenizer.token_text, engine.tokenizer.special_ids))
        self._tokenizer_pool = tokenizer_pool
        self._engine = engine
        self._chat_template = chat_template
        self._default_variables = default_template_variables
        self._trust_request_template = trust_request_chat_template

    def template_text(self) -> str:
        """The chat template; empty if there is none. The first call may import libraries: it belongs in a thread."""
        if self._chat_template:
            return self._chat_template
        found: Any = getattr(self._engine.tokenizer.template_renderer, "chat_template", None)
        if isinstance(found, dict):  # several by name
            found = found.get("default") or next(iter(found.values()), None)
        return found if isinstance(found, str) else ""

    async def render(self, request: ChatCompletionRequest | TokenizeRequest) -> TokensPrompt | ExpandedPrompt:
        """The prompt of a request's conversation, as text and as token ids, with its images, audio and videos.

        Raises:
            RequestError: The conversation or the template is not acceptable.
        """
        try:
            text, items, cut_at = await self._render_text(request)
        except RequestError as e:
            if not str(e).startswith(NO_CHAT_TEMPLATE):
                raise
            raise RequestError(f"{NO_CHAT_TEMPLATE} {_WITHOUT_TEMPLATE}", parameter="messages") from e
        if items:
            return await self._expand(text, items, request, cut_at)
        return await self._tokenizer_pool.run(lambda: self._tokenize(text, request), len(text))

    async def render_for_pooling(self, request: InputListRequest) -> TextPrompt | TokensPrompt:
        """The prompt of the conversation of a pooling request, with its images, audio and videos.

        The generation prompt and the tokenizer's special tokens are added only if the request says so.

        Raises:
            RequestError: The conversation or the template is not acceptable.
        """
        text, items, cut_at = await self._render_text(request)
        if not items and not request.add_special_tokens:
            return await self._tokenizer_pool.run(lambda: self._tokenize(text, request), len(text))
        special = bool(request.add_special_tokens)
        return rendered_prompt(text, items, cut_at, request.mm_processor_kwargs, add_special_tokens=special)

    async def _render_text(self, request: ConversationRequest) -> tuple[str, Items, str | None]:
        """The rendered conversation, with the places of its items, these, and where texts of users are cut in it."""
        if request.messages is None:
            raise RequestError("messages is missing.", parameter="messages")
        self._check_length(request)
        num_chars = num_rendered_chars(request.messages)
        if getattr(request, "truncate_prompt_tokens", None) is None:
            await self._tokenizer_pool.check_num_chars(num_chars)
        else:
            check_num_chars_to_truncate(num_chars)
        has_own_template = bool(request.chat_template)
        if has_own_template and not self._trust_request_template:
            raise RequestError(
                "chat_template is not allowed, since a template is a program: this server uses the model's own. Start "
                "it with --trust-request-chat-template to allow templates of requests.",
                parameter="chat_template",
            )
        if len(request.chat_template or "") > MAX_TEMPLATE_LENGTH:
            raise RequestError(f"chat_template may have {MAX_TEMPLATE_LENGTH} characters.", parameter="chat_template")
        render = self._tokenizer_pool.render_with_request_template if has_own_template else self._tokenizer_pool.render
        with renamed_fields(_ITEM_FIELDS):
            messages, items = take_items(request.messages, self._engine.config)
        arguments = self._template_arguments(request)
        if not items:
            return await render(messages, arguments), items, None
        with renamed_fields(_ITEM_FIELDS):
            told = await self._engine.item_placeholders()
        typed = TypedPlaceholders(
            [*self._placeholders.values(), *told.values()], self._engine.model_config.max_model_len
        )
        arguments["placeholders"] = placeholder_texts(self._engine.config, self._engine.tokenizer, told)

        def cut() -> tuple[Any, dict[str, Any]]:
            return typed.cut_messages(messages), {name: typed.cut(arguments.get(name)) for name in RENDERED_SETTINGS}

        places, settings = await self._tokenizer_pool.run(cut, num_chars)
        rendered = await render(places, arguments | settings)
        text, cut_at = await self._tokenizer_pool.run(lambda: typed.cut_prompt(rendered), len(rendered))
        return text, items, cut_at

    async def render_user_message(self, text: str, without_template: str) -> str:
        """A conversation of one message, as text that ends with the header of the answer.

        Args:
            without_template: Format of the message if there is no chat template.

        Raises:
            RequestError: The template failed.
        """
        if not await self._tokenizer_pool.run(self.template_text):
            return without_template.format(text)
        settings = {
            "chat_template": self._chat_template,
            "add_generation_prompt": True,
            "chat_template_kwargs": self._default_variables,
        }
        return await self._tokenizer_pool.render([{"role": "user", "content": text}], settings)

    def _check_length(self, request: ConversationRequest) -> None:
        """Checks that the conversation may fit into the model's context, before its messages are processed."""
        max_messages = self._engine.model_config.max_model_len
        if getattr(request, "truncate_prompt_tokens", None) is not None:
            max_messages = max(max_messages, MAX_TRUNCATED_MESSAGES)
        messages = request.messages or ()
        calls = [message.get("tool_calls") for message in messages]
        found = len(messages) + sum(len(each) for each in calls if isinstance(each, list))
        if found > max_messages:
            raise RequestError(
                f"The conversation has {found} messages and tool calls, which are at least as many tokens, but prompt "
                f"and output together may have {max_messages} (max_model_len). Shorten the conversation.",
                parameter="messages",
            )
        check_tools(getattr(request, "tools", None))
        if len(request.chat_template_kwargs or ()) > MAX_TEMPLATE_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs may have {MAX_TEMPLATE_VARIABLES} entries.", parameter="chat_template_kwargs"
            )

    def _template_arguments(self, request: ConversationRequest) -> dict[str, Any]:
        """The keyword arguments of `render_chat`."""
        continues = bool(request.continue_final_message)
        extra = dict(request.chat_template_kwargs or {})
        effort = getattr(request, "reasoning_effort", None)
        if effort is not None:
            check_reasoning_effort(effort)
            extra.setdefault("reasoning_effort", effort)
            if not _THINKING_SWITCHES & extra.keys():
                extra.update(dict.fromkeys(_THINKING_SWITCHES, effort != "none"))
        return {
            "chat_template": request.chat_template or self._chat_template,
            "add_generation_prompt": not continues and not isinstance(request, InputListRequest)
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            "continue_final_message": continues,
            "tools": getattr(request, "tools", None),
            "chat_template_kwargs": {**self._default_variables, **extra},
            "placeholders": self._placeholders,
        }

    @cached_property
    def _placeholders(self) -> dict[str, str]:
        return placeholder_texts(self._engine.config, self._engine.tokenizer)

    async def _expand(
        self, text: str, items: Items, request: ChatCompletionRequest | TokenizeRequest, cut_at: str | None
    ) -> ExpandedPrompt:
        if getattr(request, "truncate_prompt_tokens", None) is not None:
            refuse_truncation()
        special = bool(request.add_special_tokens)  # beside those of the template
        prompt = rendered_prompt(text, items, cut_at, request.mm_processor_kwargs, add_special_tokens=special)
        if (salt := getattr(request, "cache_salt", None)) is not None:
            prompt["cache_salt"] = salt
        with renamed_fields(_ITEM_FIELDS):
            return await self._engine.expand_prompt(prompt)

    def _tokenize(self, text: str, request: ConversationRequest) -> TokensPrompt:
        self._engine.input_processor.check_text(text)
        truncated = getattr(request, "truncate_prompt_tokens", None) is not None
        special = bool(request.add_special_tokens)  # beside those of the template
        ids = self._tokenizer_pool.encode_sync(text, add_special_tokens=special, truncated=truncated)
        return TokensPrompt(prompt_token_ids=ids, prompt=text)


def check_tools(tools: Sequence[Any] | None) -> None:
    """Checks the number of tools.

    Raises:
        RequestError: There are too many.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise RequestError(f"tools may have {MAX_TOOLS} entries; found {len(tools or ())}.", parameter="tools")


def check_reasoning_effort(effort: str) -> None:
    """Checks a value of `reasoning_effort`.

    Raises:
        RequestError: It is none of `REASONING_EFFORTS`.
    """
    if effort not in REASONING_EFFORTS:
        allowed = ", ".join(REASONING_EFFORTS)
        raise RequestError(
            f"reasoning_effort must be one of {allowed}; found {ascii(effort)[:60]}.", parameter="reasoning_effort"
        )
