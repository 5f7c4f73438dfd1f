"""Threads for tokenizing and chat templates, which would block the event loop with long texts.

A chat template is a program, so it runs in Jinja's sandbox, in a child process with limits of time and memory. The
model's template has one process for all conversations; a request's own template has a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mvllm.engine.frontend.input_processor import check_text_to_truncate
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_template import render_chat, resolve_chat_template, uses_transformers_template
from mvllm.entrypoints.openai.common.chat_template_renderer import SECONDS, ChatTemplateRenderer
from mvllm.errors import RequestError

T = TypeVar("T")

MAX_TEMPLATE_LENGTH = 64 << 10
_SHORT_TEXT = 1 << 18  # characters


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
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._request_template_slots = asyncio.Semaphore(2)

    async def encode(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """As `encode_sync`, in one of the threads."""
        return await self.run(
            lambda: self.encode_sync(text, add_special_tokens=add_special_tokens, truncated=truncated)
        )

    def encode_sync(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            truncated: Only the last token ids are used.

        Raises:
            RequestError: The tokenizer rejects the text, or the text is long and certainly too long for the model.
        """
        if truncated:
            check_text_to_truncate(text)
        elif len(text) > _SHORT_TEXT and (fewest := self.tokenizer.num_tokens_lower_bound(text)) >= self._max_model_len:
            raise RequestError(
                f"The prompt has at least {fewest} tokens, but prompt and output together may have "
                f"{self._max_model_len} (max_model_len). Shorten the prompt.",
                parameter="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def run(self, function: Callable[[], T]) -> T:
        """Runs `function` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

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
        return await self._templates.render(messages, {**settings, "chat_template": template}, special_tokens)

    async def render_with_request_template(self, messages: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """Renders a conversation with the template of a request, in a new process.

        Args:
            settings: Keyword arguments of `render_chat`, with `chat_template`.

        Raises:
            RequestError: The template failed, or took too much time or memory.
        """
        # The first time may import transformers.
        special = await self.run(lambda: dict(self.tokenizer.template_renderer.special_tokens_map))
        async with self._request_template_slots:
            with contextlib.closing(ChatTemplateRenderer(self._template_seconds)) as renderer:
                return await renderer.render(messages, settings, special)

    def close(self) -> None:
        """Ends the threads when their current work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
