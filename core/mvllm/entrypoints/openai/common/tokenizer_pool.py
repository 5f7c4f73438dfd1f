"""Threads for tokenizing and chat templates, which would block the event loop with long texts.

Long texts have a thread of their own, so that others do not wait for them.

A chat template is a program, so it runs in Jinja's sandbox, in a child process with limits of time and memory. The
model's template has two processes for all conversations; a request's own template has a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mvllm.engine.frontend.input_processor import check_num_chars_to_truncate
from mvllm.engine.frontend.text_threads import LONG_TEXT_CHARS, TextThreads
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_template import render_chat, resolve_chat_template, uses_transformers_template
from mvllm.entrypoints.openai.common.chat_template_renderer import SECONDS, ChatTemplateRenderer
from mvllm.errors import RequestError

T = TypeVar("T")

MAX_TEMPLATE_LENGTH = 64 << 10
_MIN_CONVERSATION_BYTES = 4 << 20
_BYTES_PER_CHAR = 16  # of a conversation as JSON, with what templates leave out, for each character that fits


class TokenizerPool:
    """Threads that work with the tokenizer.

    Args:
        tokenizer: The model's tokenizer.
        max_model_len: Longest sequence of the model, in tokens.
        templates: Renders the model's own template; without it, the template runs in this process without limits.
        template_seconds: Processor time of a template from a request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        templates: ChatTemplateRenderer | None = None,
        template_seconds: float = SECONDS,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._templates = templates
        self._template_seconds = template_seconds
        self._longest_token: int | None = None
        self._threads = TextThreads("text")
        self._request_template_slots = asyncio.Semaphore(2)

    async def encode(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """As `encode_sync`, in one of the threads."""
        return await self.run(
            lambda: self.encode_sync(text, add_special_tokens=add_special_tokens, truncated=truncated), len(text)
        )

    def encode_sync(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            truncated: Only the last token ids are used.

        Raises:
            RequestError: The tokenizer rejects the text, or the text is long and certainly too long for the model.
        """
        if truncated:
            check_num_chars_to_truncate(len(text))
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        fewest = self.tokenizer.num_tokens_lower_bound(text) if len(text) > LONG_TEXT_CHARS else 0
        if fewest >= self._max_model_len:
            raise RequestError(
                f"The prompt has at least {fewest} tokens, but prompt and output together may have "
                f"{self._max_model_len} (max_model_len). Shorten the prompt.",
                parameter="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def run(self, function: Callable[[], T], num_chars: int = 0) -> T:
        """Runs `function` in one of the threads.

        Args:
            num_chars: Characters of the texts that it works with.
        """
        return await self._threads.run(function, num_chars)

    async def check_num_chars(self, num_chars: int) -> None:
        """Checks that a text of so many characters may fit into the model's context.

        Raises:
            RequestError: It certainly does not.
        """
        if num_chars <= LONG_TEXT_CHARS:
            return
        longest = await self._max_chars_per_token()
        if longest and num_chars // longest > self._max_model_len:
            raise RequestError(
                f"The texts of the conversation have {num_chars} characters, which are at least {num_chars // longest} "
                f"tokens, but prompt and output together may have {self._max_model_len} (max_model_len). Shorten the "
                "conversation.",
                parameter="messages",
            )

    async def _max_chars_per_token(self) -> int:
        if self._longest_token is None:  # the first time takes a while
            self._longest_token = await self.run(lambda: self.tokenizer.max_chars_per_token)
        return self._longest_token

    async def _max_conversation_bytes(self) -> int | None:
        """Most bytes of a conversation as JSON. Templates leave out parts of it, such as earlier thoughts."""
        longest = await self._max_chars_per_token()
        return max(_MIN_CONVERSATION_BYTES, _BYTES_PER_CHAR * longest * self._max_model_len) if longest else None

    async def render(self, messages: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """Renders a conversation with the model's template, or that of the server's settings.

        Args:
            settings: Keyword arguments of `render_chat`.

        Raises:
            RequestError: The conversation is not acceptable, or the template failed or took too much time or memory.
        """
        if self._templates is None or not await self.run(lambda: uses_transformers_template(self.tokenizer)):
            return await self.run(lambda: render_chat(self.tokenizer, messages, **settings))
        template, special_tokens = await self.run(lambda: resolve_chat_template(self.tokenizer, settings))
        if template is None:
            return render_chat(self.tokenizer, messages, **settings)  # raises the error
        most = await self._max_conversation_bytes()
        return await self._templates.render(messages, {**settings, "chat_template": template}, special_tokens, most)

    async def render_with_request_template(self, messages: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """Renders a conversation with the template of a request, in a new process.

        Args:
            settings: Keyword arguments of `render_chat`, with `chat_template`.

        Raises:
            RequestError: The template failed, or took too much time or memory.
        """
        # The first time may import transformers.
        special = await self.run(lambda: dict(self.tokenizer.template_renderer.special_tokens_map))
        most = await self._max_conversation_bytes()
        async with self._request_template_slots:
            with contextlib.closing(ChatTemplateRenderer(self._template_seconds)) as renderer:
                return await renderer.render(messages, settings, special, most)

    def close(self) -> None:
        """Ends the threads when their current work is done."""
        self._threads.shutdown(cancel_futures=True)
