"""The memory of items of unfinished prompts: who waits, and who goes on when some is given back."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from mvllm.engine.async_items import prepare_items
from mvllm.errors import RequestError
from mvllm.multimodal.item_memory import FIRST_ESTIMATE, ItemMemory


def test_prompts_wait_in_their_order_until_there_is_room() -> None:
    seen: list[int] = []
    memory = ItemMemory(3 * FIRST_ESTIMATE)
    memory.on_change = seen.append
    first, second, third, fourth = (memory.reserve(n) for n in (2, 2, 1, 1))
    lease = first.result(0)
    assert not second.done() and not third.done()  # the third one would fit, but it is not its turn
    second.cancel()
    [lease] = lease.split([[FIRST_ESTIMATE, FIRST_ESTIMATE]])
    assert third.done() and not fourth.done() and memory.num_waiting == 1
    lease.release()
    lease.release()
    assert fourth.done()
    del third, fourth, lease  # collected, and so released
    assert memory.num_bytes == seen[-1] == 0 and max(seen) <= 3 * FIRST_ESTIMATE


def test_a_prompt_larger_than_the_limit_runs_alone() -> None:
    memory = ItemMemory(10)
    large = memory.reserve(5)
    [lease] = large.result(0).split([[5000]])
    small = memory.reserve(1)
    assert not small.done()
    lease.release()
    assert small.result(0).num_bytes > 10


def test_the_estimate_follows_the_largest_items() -> None:
    memory = ItemMemory(1 << 40)
    memory.reserve(1).result(0).split([[10 * FIRST_ESTIMATE]])
    assert memory.reserve(2).result(0).num_bytes == 20 * FIRST_ESTIMATE
    for _ in range(200):
        memory.reserve(1).result(0).split([[1000]])
    assert memory.reserve(1).result(0).num_bytes < 2000


def test_nobody_waits_after_the_end() -> None:
    memory = ItemMemory(1)
    held, waiting = memory.reserve(1).result(0), memory.reserve(1)
    memory.close()
    with pytest.raises(RequestError, match="shutting down"):
        waiting.result(0)
    with pytest.raises(RequestError, match="shutting down"):
        memory.reserve(1)
    held.release()


class Item:
    num_bytes = 50


class Items:
    """Prepares prompts at once, each with one item."""

    def __init__(self, memory: ItemMemory) -> None:
        self.memory = memory
        self.prepared: list[str] = []

    def check(self, prompt: Any) -> None:
        if prompt["prompt"] == "bad":
            raise RequestError("bad")

    def reserve(self, prompts: Any) -> Any:
        return self.memory.reserve(len(prompts))

    def submit(self, prompt: Any) -> Future[list[Item]]:
        self.prepared.append(prompt["prompt"])
        future: Future[list[Item]] = Future()
        future.set_result([Item()])
        return future


def test_nothing_of_a_prompt_that_waits_is_prepared() -> None:
    items: Any = Items(ItemMemory(60))

    def ask(name: str) -> Any:
        return prepare_items(items, [{"prompt": name, "multi_modal_data": {"image": b"x"}}])

    async def main() -> None:
        first = await ask("first")
        waiting, given_up = asyncio.create_task(ask("second")), asyncio.create_task(ask("third"))
        with pytest.raises(RequestError, match="bad"):  # said at once
            await ask("bad")
        await asyncio.sleep(0.01)
        assert items.prepared == ["first"]
        given_up.cancel()
        first.leases[0].release()
        await waiting
        assert items.prepared == ["first", "second"] and items.memory.num_bytes == 50

    asyncio.run(main())
    assert items.memory.num_bytes == 0


def test_prompts_of_one_call_do_not_wait_for_each_other() -> None:
    items: Any = Items(ItemMemory(60))
    prompts = [{"prompt": str(i), "multi_modal_data": {"image": b"x"}} for i in range(5)]
    found = asyncio.run(prepare_items(items, prompts))
    assert len(items.prepared) == 5 and [lease and lease.num_bytes for lease in found.leases] == [50] * 5
