"""Threads of the tokenizer: long texts do not hold up others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mvllm.engine.frontend.text_threads import LONG_TEXT_CHARS, TextThreads
from mvllm.engine.frontend.tokenization_cost import num_text_chars


def test_short_texts_do_not_wait_for_long_ones() -> None:
    threads, ended = TextThreads("test"), threading.Event()

    async def main() -> None:
        attack = [asyncio.create_task(threads.run(lambda: ended.wait(120), LONG_TEXT_CHARS + 1)) for _ in range(5)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run(lambda: 1, LONG_TEXT_CHARS), 120) == 1
        assert not any(task.done() for task in attack)
        ended.set()
        assert all(await asyncio.wait_for(asyncio.gather(*attack), 120))

    try:
        asyncio.run(main())
    finally:
        ended.set()
        threads.shutdown()
        threads.shutdown()


def test_characters_of_prompts() -> None:
    prompts: list[Any] = ["abc", {"prompt": "de"}, {"prompt_token_ids": [1, 2]}, [1], None, {"prompt": 5}]
    assert num_text_chars(prompts) == 5
