"""The memory of items of unfinished prompts: who waits, and who goes on when some is given back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.engine.async_items import AsyncItems, prepare_items
from mvllm.engine.async_llm import AsyncLLM
from mvllm.errors import RequestError
from mvllm.multimodal.item_memory import FIRST_ESTIMATE, ItemMemory
from mvllm.multimodal.media_fetcher import FetchGroup, MediaFetcher
from mvllm.multimodal.processor_client import RemoteItem


def test_prompts_wait_in_their_order_until_there_is_room() -> None:
    seen: list[int] = []
    memory = ItemMemory(3 * FIRST_ESTIMATE, seen.append)
    first, second, third, fourth = (memory.reserve({"image": n}) for n in (2, 2, 1, 1))
    lease = first.result(0)
    assert not second.done() and not third.done()  # the third one would fit, but it is not its turn
    second.cancel()
    assert third.done() and memory.num_waiting == 1  # it is its turn now
    [lease] = lease.split([[("image", FIRST_ESTIMATE)] * 2])
    assert third.done() and not fourth.done() and memory.num_waiting == 1
    lease.release()
    lease.release()
    assert fourth.done()
    del third, fourth, lease  # collected, and so released
    assert memory.num_bytes == seen[-1] == 0 and max(seen) <= 3 * FIRST_ESTIMATE


def test_a_prompt_larger_than_the_limit_runs_alone() -> None:
    memory = ItemMemory(10)
    large = memory.reserve({"image": 5})
    [lease] = large.result(0).split([[("image", 5000)]])
    small = memory.reserve({"image": 1})
    assert not small.done()
    lease.release()
    assert small.result(0).num_bytes > 10


def test_the_estimate_follows_the_largest_items_of_a_modality() -> None:
    memory = ItemMemory(1 << 40)
    memory.reserve({"video": 1}).result(0).split([[("video", 10 * FIRST_ESTIMATE)]])
    assert memory.reserve({"video": 2}).result(0).num_bytes == 20 * FIRST_ESTIMATE
    assert memory.reserve({"image": 2}).result(0).num_bytes == 2 * FIRST_ESTIMATE
    for _ in range(200):
        memory.reserve({"video": 1}).result(0).split([[("video", 1000)]])
    assert memory.reserve({"video": 1}).result(0).num_bytes < 2000


def test_nobody_waits_after_the_end() -> None:
    memory = ItemMemory(1)
    held, waiting = memory.reserve({"image": 1}).result(0), memory.reserve({"image": 1})
    memory.close()
    with pytest.raises(RequestError, match="shutting down"):
        waiting.result(0)
    with pytest.raises(RequestError, match="shutting down"):
        memory.reserve({"image": 1})
    held.release()


class Item:
    modality = "image"
    num_bytes = 50


class Items:
    """Prepares prompts at once, each with one item."""

    def __init__(self, memory: ItemMemory) -> None:
        self.memory = memory
        self.max_bytes = memory.max_bytes
        self.prepared: list[str] = []

    def check(self, prompt: Any) -> None:
        if prompt["prompt"] == "bad":
            raise RequestError("bad")

    def reserve(self, prompts: Any) -> Any:
        return self.memory.reserve({"image": len(prompts)})

    def fetch_group(self) -> FetchGroup:
        return MediaFetcher(lambda url: b"x", 1).group()

    def start_fetching(self, prompt: Any, group: FetchGroup) -> list[RemoteItem]:
        return []

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
    items: Any = Items(ItemMemory(250))  # which is less than the estimate
    prompts = [{"prompt": str(i), "multi_modal_data": {"image": b"x"}} for i in range(5)]
    found = asyncio.run(prepare_items(items, prompts))
    assert len(items.prepared) == 5 and [lease and lease.num_bytes for lease in found.leases] == [50] * 5


def test_prompts_of_one_call_that_take_more_than_all_memory_are_refused_early() -> None:
    items: Any = Items(ItemMemory(120))
    prompts = [{"prompt": str(i), "multi_modal_data": {"image": b"x"}} for i in range(2000)]
    with pytest.raises(RequestError, match=r"first 3 prompts .* take 150 bytes.*120.*several requests"):
        asyncio.run(prepare_items(items, prompts))
    assert len(items.prepared) < 50
    assert items.memory.num_bytes == 0


def test_a_refused_call_keeps_no_items() -> None:
    seen: list[weakref.ref[Item]] = []

    class Failing(Items):
        def submit(self, prompt: Any) -> Future[list[Item]]:
            future = super().submit(prompt)
            seen.append(weakref.ref(future.result()[0]))
            if prompt["prompt"] == "2":
                future = Future()
                future.set_exception(RequestError("broken"))
            return future

    async def ask() -> str:
        prompts = [{"prompt": str(i), "multi_modal_data": {"image": b"x"}} for i in range(3)]
        try:
            await prepare_items(Failing(ItemMemory(1000)), prompts)  # type: ignore[arg-type]
        except RequestError as e:
            return str(e)
        return ""

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(ask()) == "Prompt 2 of 3: broken"
        assert len(seen) == 3 and not any(item() for item in seen)
    finally:
        gc.enable()


class Engine(AsyncLLM):
    """Has no engine core; what it does after items are prepared fails."""

    def __init__(self, memory: ItemMemory) -> None:
        self._admission: Any = SimpleNamespace(
            check_capacity=lambda *unused: None, tokenizing=lambda count: nullcontext()
        )
        items = Items(memory)
        self.input_processor: Any = SimpleNamespace(items=items, expand=self.fail, process_batch=self.fail)
        items.check_embeds_enabled = lambda: None  # type: ignore[attr-defined]
        client: Any = SimpleNamespace(memory=memory, read_embeddings=self.fail, known_placeholders={"image": "<i>"})
        checks = self._require_ready, self._require_ready
        core: Any = None
        self.items = AsyncItems(core, client, self.input_processor, self._admission, self._run_in_thread, *checks)

    def fail(self, *unused: Any, **more: Any) -> Any:
        raise RequestError("too long")

    def _require_ready(self) -> None:
        pass

    async def _run_in_thread(self, work: Callable[[], Any], num_chars: int = 0) -> Any:
        return work()


def test_the_memory_of_refused_prompts_is_released_though_the_error_lives() -> None:
    memory = ItemMemory(1000)
    engine = Engine(memory)
    prompt: Any = {"prompt": "a", "multi_modal_data": {"image": b"x"}}
    for ask in (
        lambda: engine.expand_prompt(prompt),
        lambda: engine.add_requests([prompt], [None], "id"),
        lambda: engine.read_prompt_embeds(["a"]),
    ):
        with pytest.raises(RequestError, match="too long") as caught:
            asyncio.run(ask())
        assert caught.tb is not None and memory.num_bytes == 0
        assert memory.reserve({"image": 1}).done()


def test_known_placeholders_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ItemMemory(1))
    monkeypatch.setattr(asyncio, "to_thread", engine.fail)
    assert asyncio.run(engine.item_placeholders()) == {"image": "<i>"}
