"""What is done with text outside the event loop: chat templates and tokenizing, which long texts make slow.

A template that comes with a request is somebody's program. It runs in the sandbox of the templates' language, in a
process of its own with little memory, which is ended when its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from mvllm.engine.input_processor import check_cut_text
from mvllm.engine.tokenizer import Tokenizer
from mvllm.entrypoints.openai.template_process import READY, Rendered, TemplateJob
from mvllm.errors import RequestError
from mvllm.executor.process_tools import search_path

T = TypeVar("T")

MAX_TEMPLATE_LENGTH = 64 << 10
_SOON = 1 << 18  # characters


class TextWork:
    """Threads for work on text.

    Args:
        tokenizer: The model's tokenizer.
        max_model_len: Longest sequence of the model, in tokens.
        template_seconds: What a template that comes with a request may take.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, template_seconds: float = 5.0) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template_seconds = template_seconds
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._foreign = asyncio.Semaphore(2)

    async def encode(self, text: str, *, add_special_tokens: bool, is_cut: bool = False) -> list[int]:
        """The token ids of `text`; as `encode_here`, in one of the threads."""
        return await self.run(lambda: self.encode_here(text, add_special_tokens=add_special_tokens, is_cut=is_cut))

    def encode_here(self, text: str, *, add_special_tokens: bool, is_cut: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            is_cut: Only the last of them will be used.

        Raises:
            RequestError: The tokenizer rejects it, or it is so long that this would take a while, and too long for
                the model.
        """
        if is_cut:
            check_cut_text(text)
        elif len(text) > _SOON and (fewest := self.tokenizer.fewest_tokens(text)) >= self._max_model_len:
            raise RequestError(
                f"The prompt has at least {fewest} tokens, but prompt and output together may have "
                f"{self._max_model_len} (max_model_len). Shorten the prompt.",
                parameter="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def run(self, work: Callable[[], T]) -> T:
        """Does `work` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_foreign(
        self, messages: Sequence[Any], settings: dict[str, Any], special_tokens: dict[str, Any]
    ) -> str:
        """Renders a conversation with somebody else's template, in a process of its own.

        Args:
            settings: Of `render_chat`.
            special_tokens: What templates know by name.

        Raises:
            RequestError: The template failed, or took too much time or memory.
        """
        job = TemplateJob(math.ceil(self._template_seconds), special_tokens, list(messages), settings)
        async with self._foreign:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "mvllm.entrypoints.openai.template_process",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
                start_new_session=True,
            )
            try:
                return await self._rendered(process, await self.run(lambda: msgspec.json.encode(job)))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())

    async def _rendered(self, process: asyncio.subprocess.Process, job: bytes) -> str:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(job)
            await process.stdin.drain()
            process.stdin.close()
        if await process.stdout.readline() != READY:
            raise RuntimeError(f"the process for templates did not start; exit status {await process.wait()}")
        try:
            answer = await asyncio.wait_for(process.stdout.read(), self._template_seconds)
        except TimeoutError:
            answer = b""
        if not answer:  # ended by the clock, or by the kernel
            raise RequestError(
                f"The chat template took longer than {self._template_seconds:g} s, or too much memory.",
                parameter="chat_template",
            )
        rendered = msgspec.json.decode(answer, type=Rendered)
        if rendered.text is None:
            raise RequestError(rendered.error or "The chat template failed.", parameter=rendered.parameter)
        return rendered.text

    def close(self) -> None:
        """Ends the threads when their work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
