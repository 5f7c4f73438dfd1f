"""Threads that tokenize and decode. Long texts have a thread of their own, so that nobody else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

LONG_TEXT_CHARS = 1 << 18
"""A text of more characters is a long one."""
_NUM_THREADS = 2


class TextThreads:
    """The threads. They start when they are needed.

    Args:
        name: Beginning of their names.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=name)
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-long")

    async def run(self, work: Callable[[], _T], num_chars: int = 0) -> _T:
        """The result of `work`, called in one of the threads.

        Args:
            num_chars: Characters of the texts that it works with.
        """
        threads = self._threads if num_chars <= LONG_TEXT_CHARS else self._long_text_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Ends the threads when their current work is done, and that which waits unless it is cancelled. Idempotent."""
        for each in (self._threads, self._long_text_thread):
            each.shutdown(wait=False, cancel_futures=cancel_futures)
