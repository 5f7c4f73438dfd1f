"""What is done with text outside the event loop: chat templates and tokenizing, which long texts make slow.

A template is somebody's program, whether it came with the model or with a request. It runs in the sandbox of the
templates' language, in a process of its own with little memory, which is ended when its time is up. The model's
template has one process for all conversations; one that comes with a request has one for itself.
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
_SOON = 1 << 18  # characters


class TokenizerPool:
    """Threads for work on text.

    Args:
        tokenizer: The model's tokenizer.
        max_model_len: Longest sequence of the model, in tokens.
        templates: Renders the model's own template; without it, that runs in this process and without limits.
        template_seconds: What a template that comes with a request may take.
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
        """The token ids of `text`; as `encode_sync`, in one of the threads."""
        return await self.run(
            lambda: self.encode_sync(text, add_special_tokens=add_special_tokens, truncated=truncated)
        )

    def encode_sync(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            truncated: Only the last of them will be used.

        Raises:
            RequestError: The tokenizer rejects it, or it is so long that this would take a while, and too long for
                the model.
        """
        if truncated:
            check_text_to_truncate(text)
        elif len(text) > _SOON and (fewest := self.tokenizer.num_tokens_lower_bound(text)) >= self._max_model_len:
            raise RequestError(
                f"The prompt has at least {fewest} tokens, but prompt and output together may have "
                f"{self._max_model_len} (max_model_len). Shorten the prompt.",
                parameter="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def run(self, work: Callable[[], T]) -> T:
        """Does `work` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def render(self, messages: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """Renders a conversation with the model's own template, or the one that the server was started with.

        Args:
            settings: Of `render_chat`.

        Raises:
            RequestError: The conversation is not acceptable, or the template failed or took too much time or memory.
        """
        if self._templates is None or not await self.run(lambda: uses_transformers_template(self.tokenizer)):
            return await self.run(lambda: render_chat(self.tokenizer, messages, **settings))
        template, special_tokens = await self.run(lambda: resolve_chat_template(self.tokenizer, settings))
        if template is None:
            return render_chat(self.tokenizer, messages, **settings)  # says why not
        return await self._templates.render(messages, {**settings, "chat_template": template}, special_tokens)

    async def render_with_request_template(self, messages: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """Renders a conversation with somebody else's template, in a process that ends with it.

        Args:
            settings: Of `render_chat`, `chat_template` included.

        Raises:
            RequestError: The template failed, or took too much time or memory.
        """
        special = await self.run(lambda: dict(self.tokenizer.hf.special_tokens_map))  # slow the first time
        async with self._request_template_slots:
            with contextlib.closing(ChatTemplateRenderer(self._template_seconds)) as renderer:
                return await renderer.render(messages, settings, special)

    def close(self) -> None:
        """Ends the threads when their work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
