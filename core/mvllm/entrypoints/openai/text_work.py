"""What is done with text outside the event loop: chat templates and tokenizing, which long texts make slow.

A template that comes with a request is somebody's program. It runs in the sandbox of the templates' language, in a
thread of its own, and is ended there when its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mvllm.engine.tokenizer import Tokenizer
from mvllm.errors import RequestError

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

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`; as `encode_here`, in one of the threads."""
        return await self.run(lambda: self.encode_here(text, add_special_tokens=add_special_tokens))

    def encode_here(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`.

        Raises:
            RequestError: The tokenizer rejects it, or it is so long that this would take a while, and too long for
                the model.
        """
        if len(text) > _SOON and (fewest := self.tokenizer.fewest_tokens(text)) >= self._max_model_len:
            raise RequestError(
                f"The prompt has at least {fewest} tokens, but prompt and output together may have "
                f"{self._max_model_len} (max_model_len). Shorten the prompt.",
                parameter="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def run(self, work: Callable[[], T]) -> T:
        """Does `work` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_foreign(self, work: Callable[[], T]) -> T:
        """Does `work`, which runs somebody else's template, for as long as it may take.

        Raises:
            RequestError: It took longer.
        """
        async with self._foreign:
            job = _Job(work)
            try:
                return await asyncio.wait_for(job.done, self._template_seconds)
            except TimeoutError:
                raise RequestError(
                    f"The chat template took longer than {self._template_seconds:g} s.", parameter="chat_template"
                ) from None
            finally:
                job.end()

    def close(self) -> None:
        """Ends the threads when their work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _TimeUp(BaseException):
    """Raised in a thread whose work is no longer wanted."""


class _Job:
    """Work in a thread of its own, which can be ended between two steps of Python."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self._work = work
        self._thread = threading.Thread(target=self._run, name="template", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread if it still runs."""
        if self._thread.is_alive() and self._thread.ident is not None:
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_TimeUp))

    def _run(self) -> None:
        try:
            try:
                value = self._work()
            except Exception as e:  # noqa: BLE001  (raised where it is waited for)
                self._tell(self._fail, e)
            else:
                self._tell(self._succeed, value)
        except _TimeUp:
            pass

    def _tell(self, tell: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed; nobody waits
            self._loop.call_soon_threadsafe(tell, value)

    def _succeed(self, value: Any) -> None:
        if not self.done.done():
            self.done.set_result(value)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
