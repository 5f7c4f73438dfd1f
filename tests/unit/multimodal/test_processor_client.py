"""The processor's process: what it is asked, what it keeps, and what happens when it ends."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import save

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.engine.async_items import prepare_items
from mvllm.engine.frontend.prompt_items import PromptItems
from mvllm.errors import RequestError
from mvllm.multimodal import processor_client, processor_main, processor_pool
from mvllm.multimodal.frame_sampling import FrameDefaults
from mvllm.multimodal.item_memory import ItemMemory
from mvllm.multimodal.media_fetcher import MediaFetcher, current_client
from mvllm.multimodal.media_source import MediaSource, load_source
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processed_item_cache import ProcessedItemCache
from mvllm.multimodal.processor_client import ProcessorClient
from mvllm.multimodal.processor_main import read_array
from mvllm.multimodal.processor_messages import ItemJob, ItemResult
from tests.helpers.processes import wait_until

MODEL: Any = SimpleNamespace(
    model_impl="auto",
    model="model",
    path=Path("/nowhere"),
    architecture="SomeModel",
    trust_remote_code=False,
    multimodal=MultiModalModel(placeholders={"image": 4}),
    hf_config=HFConfig({}, "config.json"),
    hidden_size=3,
    max_model_len=10,
    dtype="float32",
)


@pytest.fixture(autouse=True, scope="module")
def scripted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor_client, "_MODULE", "tests.helpers.scripted_processor")
        yield


class Observer:
    """Records which items were found in the cache."""

    def __init__(self) -> None:
        self.cached: list[bool] = []

    def observe_item(self, is_cached: bool, seconds: float) -> None:
        assert seconds >= 0
        self.cached.append(is_cached)

    def observe_item_memory(self, num_bytes: int) -> None:
        raise AssertionError("no prompt was prepared")


@pytest.fixture(scope="module")
def observer() -> Observer:
    return Observer()


@pytest.fixture(scope="module")
def shared_client(observer: Observer) -> Iterator[ProcessorClient]:
    client = ProcessorClient(MODEL, MultiModalConfig(max_pixels=10_000, num_processes=1), observer)
    assert client.pids == []  # nothing is started before the first item
    yield client
    pids = client.pids
    client.close()
    assert pids and not any(map(psutil.pid_exists, pids))


@pytest.fixture
def client(shared_client: ProcessorClient, observer: Observer) -> ProcessorClient:
    shared_client.cache = ProcessedItemCache(1 << 20)
    observer.cached = []
    return shared_client


def image(width: int = 5, height: int = 6) -> Image.Image:
    return Image.new("RGB", (width, height))


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    image(width, height).save(file, "PNG")
    return file.getvalue()


def size_of(item: ProcessedItem) -> tuple[int, int]:
    width, height = item.features["size"].data
    return width, height


def process(client: ProcessorClient, *images: Any, **more: Any) -> list[ProcessedItem]:
    return client.process({"multi_modal_data": {"image": list(images)}, **more})


def test_items_are_processed_in_their_order_and_kept(client: ProcessorClient, observer: Observer) -> None:
    seen = observer.cached
    assert list(map(size_of, process(client, image(1, 2), image(3, 4)))) == [(1, 2), (3, 4)]
    assert seen == [False, False]
    [found] = process(client, image(3, 4))
    assert size_of(found) == (3, 4) and seen[2:] == [True]
    process(client, image(3, 4), mm_processor_kwargs={"size": 3})
    assert seen[3:] == [False]  # other arguments, other features


def test_items_of_more_tokens_than_the_context_are_refused() -> None:
    long = 77  # see scripted_processor
    # A client of its own: items after the refused one may still be in work when the prompt is refused.
    with closing(ProcessorClient(MODEL, MultiModalConfig(max_pixels=10_000))) as client:
        assert len(process(client, image(5, long), image(5, long))) == 2
        with pytest.raises(RequestError, match=r"The image takes 11 tokens.*10"):
            process(client, image(11, long))
        with pytest.raises(RequestError, match=r"first 3 items of the prompt take 14 tokens.*10"):
            process(client, image(5, long), image(4, long), image(5, long), image(1, long))


def test_items_whose_features_depend_on_the_others_are_kept_by_their_number(
    client: ProcessorClient, observer: Observer
) -> None:
    seen = observer.cached
    few, many = process(client, image())[0], process(client, image(1, 1), image(2, 2), image(3, 3))
    assert seen == [False] * 4
    assert process(client, image(3, 3), image(2, 2), image(1, 1))[2] is many[0] and all(seen[4:])
    assert process(client, image())[0] is few


def test_names_of_users_stand_for_contents(client: ProcessorClient) -> None:
    first = process(client, image(1, 1), multi_modal_uuids={"image": ["a"]})
    assert process(client, image(9, 9), multi_modal_uuids={"image": ["a"]})[0] is first[0]
    assert size_of(process(client, image(9, 9), multi_modal_uuids={"image": ["b"]})[0]) == (9, 9)


def test_prompts_of_different_cache_salts_share_no_items(client: ProcessorClient) -> None:
    def items(content: Any, salt: str | None, **more: Any) -> Any:
        return process(client, content, **more, **({} if salt is None else {"cache_salt": salt}))[0]

    first = items(image(7, 3), "a")
    assert items(image(7, 3), "a") is first
    assert items(image(7, 3), "b") is not first and items(image(7, 3), None) is not first
    named = {"multi_modal_uuids": {"image": ["of a user"]}}
    assert size_of(items(image(1, 1), "a", **named)) == (1, 1)
    assert size_of(items(image(9, 9), "b", **named)) == (9, 9)
    assert size_of(items(image(5, 5), None, **named)) == (5, 5)


def test_a_cache_of_a_few_bytes_keeps_the_items_used_last(client: ProcessorClient) -> None:
    items = process(client, *(image(i + 1, 1) for i in range(2)))
    cache = ProcessedItemCache(items[0].num_bytes + 1)
    cache.put(b"a", {}, items[0], depends_on_counts=False, generation=0)
    cache.put(b"b", {}, items[1], depends_on_counts=False, generation=0)
    assert cache.get(b"a", {}) is None and cache.get(b"b", {}) is items[1]
    assert (len(cache), cache.num_bytes) == (1, items[1].num_bytes)
    none = ProcessedItemCache(0)
    none.put(b"a", {}, items[0], depends_on_counts=False, generation=0)
    assert len(none) == 0


def test_an_item_that_was_in_work_when_the_cache_was_cleared_is_not_kept(client: ProcessorClient) -> None:
    pool = client._start()
    run = pool.run

    def clear_meanwhile(job: ItemJob) -> ItemResult:
        client.cache.clear()
        return run(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "run", clear_meanwhile)
        process(client, image(3, 4))
    assert len(client.cache) == 0
    process(client, image(3, 4))
    assert len(client.cache) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"crash", "the decoder crashed, or needs more memory"),
        (b"killed", "was killed twice"),
        (b"memory", "takes more memory than the 4096 MB allowed"),
        (b"loop", "takes more than 60 s"),
    ],
)
def test_a_process_that_ends_fails_its_request_only(client: ProcessorClient, content: bytes, why: str) -> None:
    process(client, image())
    [before] = client.pids
    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(process, client, content)
        good = threads.submit(process, client, image(7, 7))  # waits behind it
        with pytest.raises(RequestError, match=why) as caught:
            bad.result()
        assert caught.value.parameter == "multi_modal_data"
        assert size_of(good.result()[0]) == (7, 7)
    assert size_of(process(client, image(8, 8))[0]) == (8, 8)
    assert client.pids != [before] and not psutil.pid_exists(before)


def test_a_process_that_is_killed_while_idle_is_replaced(client: ProcessorClient) -> None:
    process(client, image())
    [before] = client.pids
    os.kill(before, signal.SIGKILL)
    assert size_of(process(client, image(2, 3))[0]) == (2, 3)
    assert client.pids != [before]


def test_another_process_starts_for_an_image_that_waits_and_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_pool, "PATIENCE", 0.1)
    monkeypatch.setattr(processor_pool, "IDLE_SECONDS", 0.5)
    model = SimpleNamespace(**{**vars(MODEL), "multimodal": MultiModalModel(placeholders={"image": 4, "video": 5})})
    with (
        closing(ProcessorClient(model, MultiModalConfig(num_processes=2))) as client,  # type: ignore[arg-type]
        ThreadPoolExecutor(2) as threads,
    ):
        process(client, image())
        [first] = client.pids
        videos = [threads.submit(client.process, {"multi_modal_data": {"video": b"very slow"}}) for _ in range(2)]
        wait_until(lambda: any(each.running() for each in videos), 120, "a video is in work")
        assert [size_of(process(client, image(i, 1))[0]) for i in (1, 2)] == [(1, 1), (2, 1)]
        assert first in client.pids and len(client.pids) == 2
        wait_until(lambda: client.pids == [first], 120, "the second process has ended")
        client.close()
        assert all(isinstance(each.exception(timeout=120), RequestError) for each in videos)


def test_a_processor_that_cannot_be_loaded_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken").touch()
    model = SimpleNamespace(**{**vars(MODEL), "path": tmp_path})
    with closing(ProcessorClient(model, MultiModalConfig())) as client:  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(RequestError, match=r"processor of the model's folder cannot be.*again after 30 s"):
                process(client, image())
            assert client.pids == []  # the answer is known for a while, without a process
        monkeypatch.setattr(processor_pool.time, "monotonic", lambda now=time.monotonic: now() + 31)
        (tmp_path / "broken").unlink()
        assert size_of(process(client, image(2, 3))[0]) == (2, 3)


def test_a_process_that_cannot_load_the_processor_leaves_its_items_to_one_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_pool, "PATIENCE", 0.05)
    model = SimpleNamespace(**{**vars(MODEL), "path": tmp_path})
    with (
        closing(ProcessorClient(model, MultiModalConfig(num_processes=2))) as client,  # type: ignore[arg-type]
        ThreadPoolExecutor(3) as threads,
    ):
        process(client, image())
        (tmp_path / "broken").touch()
        slow = [threads.submit(process, client, b"slow") for _ in range(3)]  # the second process starts for one
        assert all("cannot be loaded" not in str(each.exception()) for each in slow)
        wait_until(lambda: client._start()._off_until[1] > 0, 120, "the second process has failed")
        assert size_of(process(client, image(2, 3))[0]) == (2, 3)
        assert len(client.pids) == 1


def test_the_program_ends_if_the_processor_cannot_be_loaded(
    server: processor_main.JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*unused: Any, **settings: Any) -> None:
        raise AttributeError("a processor of other code")

    monkeypatch.setattr("mvllm.multimodal.item_processor.ItemProcessor", fail)
    result = server.run(ItemJob(MediaSource("image", "encoded", b"x"), {}))
    assert result.is_last and result.is_load_failure and "a processor of other code" in str(result.error)


def test_no_event_loop_waits_for_an_item(client: ProcessorClient) -> None:
    async def main() -> int:
        future = asyncio.wrap_future(client.submit({"multi_modal_data": {"image": [b"slow"]}}))
        turns = 0
        while not future.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert isinstance(future.exception(), RequestError)
        return turns

    assert asyncio.run(main()) > 5


def test_hosts_that_do_not_answer_delay_neither_data_urls_nor_the_urls_of_others(
    client: ProcessorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def fetch(url: str) -> bytes:
        assert "fine.test" in url or answered.wait(120)
        return png(7, 8)

    monkeypatch.setattr(client, "fetcher", MediaFetcher(fetch, 1 << 20))
    monkeypatch.setattr(client, "memory", ItemMemory(1))  # one prompt at a time
    items = PromptItems(SimpleNamespace(multimodal=client._config), client)  # type: ignore[arg-type]

    async def prepare(who: str, *images: str) -> list[tuple[int, int]]:
        current_client.set(who)
        with await prepare_items(items, [{"multi_modal_data": {"image": list(images)}}]) as prepared:
            for lease in prepared.leases:
                assert lease is not None
                lease.release()
            return list(map(size_of, (prepared.items or [])[0]))

    async def main() -> None:
        attack = [asyncio.create_task(prepare("attacker", f"http://h{i}.test/", "http://h.test/")) for i in range(60)]
        await asyncio.sleep(0)
        data_url = f"data:image/png;base64,{base64.b64encode(png(3, 4)).decode()}"
        asked = [prepare("attacker", data_url), prepare("victim", data_url, "http://fine.test/a.png", data_url)]
        found = await asyncio.wait_for(asyncio.gather(*asked), 120)
        assert found == [[(3, 4)], [(3, 4), (7, 8), (3, 4)]]
        assert not any(task.done() for task in attack) and client.memory.num_bytes == 0
        attack[0].cancel()
        answered.set()
        assert await asyncio.wait_for(asyncio.gather(*attack[1:]), 120) == [[(7, 8)] * 2] * 59

    asyncio.run(main())
    client.fetcher.close()


def test_after_close_every_item_is_refused_at_once() -> None:
    client = ProcessorClient(MODEL, MultiModalConfig())
    process(client, image())
    [pid] = client.pids
    future = client.submit({"multi_modal_data": {"image": [b"slow"]}})
    client.close()
    client.close()
    assert isinstance(future.exception(timeout=120), RequestError)
    wait_until(lambda: not psutil.pid_exists(pid), 120, "the process has ended")
    with pytest.raises(RequestError, match="shutting down"):
        process(client, image())


@pytest.mark.parametrize(
    ("prompt", "why", "parameter"),
    [
        ({"multi_modal_data": {"image": [image()] * 17}}, "17 items of modality 'image'; 16", "multi_modal_data"),
        ({"multi_modal_data": {"image": [image()] * 1000}}, "1000 items", "multi_modal_data"),
        ({"multi_modal_data": {"audio": [b"x"]}}, "takes only text and image", "multi_modal_data"),
        ({"multi_modal_data": {"picture": [b"x"]}}, "image, video, audio", "multi_modal_data"),
        ({"multi_modal_data": [1]}, "must be a dict", "multi_modal_data"),
        ({"multi_modal_data": {"image": b"x"}, "mm_processor_kwargs": 3}, "must be a dict", "mm_processor_kwargs"),
        (
            {"multi_modal_data": {"image": b"x"}, "mm_processor_kwargs": {"device": "x"}},
            "device",
            "mm_processor_kwargs",
        ),
        (
            {"multi_modal_data": {"image": b"x"}, "mm_processor_kwargs": {"images_kwargs": {"device": "x"}}},
            "may not set device",
            "mm_processor_kwargs",
        ),
        ({"multi_modal_data": {"image": b"x"}, "mm_processor_kwargs": {"a": {1}}}, "JSON", "mm_processor_kwargs"),
        ({"multi_modal_data": {"image": b"x"}, "multi_modal_uuids": {"image": [1]}}, "a text", "multi_modal_uuids"),
        ({"multi_modal_data": {"image": b"x"}, "multi_modal_uuids": {"image": "ab" * 200}}, "256", "multi_modal_uuids"),
        (
            {"multi_modal_data": {"image": b"x"}, "multi_modal_uuids": {"image": ["a", "b"]}},
            "each",
            "multi_modal_uuids",
        ),
    ],
)
def test_prompts_that_are_refused_before_anything_is_decoded(prompt: Any, why: str, parameter: str) -> None:
    client = ProcessorClient(MODEL, MultiModalConfig())
    for call in (client.process, client.submit):
        with pytest.raises(RequestError, match=why) as caught:
            call(prompt)
        assert caught.value.parameter == parameter
    assert client.pids == []
    client.close()


def test_a_model_for_text_and_a_modality_that_is_off() -> None:
    text = SimpleNamespace(**{**vars(MODEL), "multimodal": None})
    prompt = {"multi_modal_data": {"image": image()}}
    with pytest.raises(RequestError, match="takes only text; the prompt has items of modality 'image'"):
        ProcessorClient(text, MultiModalConfig()).process(prompt)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="0 are allowed"):
        ProcessorClient(MODEL, MultiModalConfig(limit_per_prompt={"image": 0})).process(prompt)


# --- the program


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> processor_main.JobServer:
    """A JobServer of this process, which gets no limits."""
    monkeypatch.setattr(processor_main, "limit_memory", lambda num_bytes: None)
    monkeypatch.setattr(processor_main, "limit_processor_time", lambda seconds: None)
    start = processor_client._start_message(MODEL, MultiModalConfig(processor_kwargs={"num_frames": 3}))
    return processor_main.JobServer(start)


def test_other_frames_of_a_named_video_have_another_name(server: processor_main.JobServer) -> None:
    seen: list[tuple[list[int], str | None]] = []

    def process(modality: str, content: Any, *, uuid: str | None, **unused: Any) -> None:
        seen.append((content.indices, uuid))
        raise RequestError("seen")

    family = SimpleNamespace(frame_defaults=FrameDefaults)
    server._processor = SimpleNamespace(process=process, family=family)
    frames = load_source("video", np.zeros((9, 2, 2, 3), np.uint8), MultiModalConfig())
    for kwargs in (b"{}", b'{"num_frames": 2}', b'{"num_frames": 9}', b'{"fps": 12}'):
        assert server.run(ItemJob(frames, {"video": 1}, kwargs, uuid="a")).error == "seen"
    indices, names = zip(*seen, strict=True)
    assert list(map(len, indices)) == [3, 2, 9, 4]  # a request's settings replace the engine's
    assert names[0] == "a" and len(set(names)) == 4


def test_the_windows_of_several_audios_are_decoded_once(
    server: processor_main.JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    def decode(source: MediaSource, *unused: Any, **settings: Any) -> bytes:
        seen.append(source.data)
        return source.data

    def process(modality: str, content: bytes, **unused: Any) -> None:
        raise RequestError(content.decode())

    monkeypatch.setattr(processor_main, "decode", decode)
    server._processor = SimpleNamespace(process=process, family=SimpleNamespace(sampling_rate=lambda: 16000))
    names = [b"%d" % i for i in range(processor_main.MAX_KEPT)]

    def ask(name: bytes, window: int) -> None:
        job = ItemJob(MediaSource("audio", "encoded", name), {"audio": 1}, b'{"audio_window": %d}' % window)
        assert server.run(job).error == name.decode()

    for window in range(3):
        for name in names:
            ask(name, window)
    assert seen == names
    for name in (names[0], b"new", names[0], names[1]):
        ask(name, 0)
    assert seen[len(names) :] == [b"new", names[1]]  # dropped: used least recently


def test_a_processor_is_loaded_without_the_limit_of_earlier_jobs(
    server: processor_main.JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(processor_main, "limit_memory", lambda num_bytes: seen.append("limit"))
    monkeypatch.setattr(processor_main.resource, "setrlimit", lambda which, limits: seen.append("lift"))
    monkeypatch.setattr(server, "_load", lambda: seen.append("load"))
    monkeypatch.setattr(server, "_process", lambda job: ItemResult())
    for modality in ("embeds", "embeds", "image"):
        server.run(ItemJob(MediaSource(modality, "encoded", b"x"), {}))
    assert seen == ["limit", "lift", "load", "limit"]


# --- ready embeddings


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def test_files_with_embeddings(client: ProcessorClient) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for data in (npy(values), npy(values[None].astype(np.float64)), save({"x": values.astype(np.float16)})):
        found = client.read_embeddings(base64.b64encode(data).decode())
        assert (found.dtype, found.shape, found.data) == ("float32", [2, 3], values.tobytes())
    for bad, why in (
        (npy(np.zeros((11, 3), np.float32)), "11 rows; 10"),
        (npy(np.zeros((2, 4), np.float32)), r"\[tokens, 3\]"),
        (npy(np.full((2, 3), np.nan)), "not finite"),
    ):
        with pytest.raises(RequestError, match=why):
            client.read_embeddings(base64.b64encode(bad).decode())
    with pytest.raises(RequestError, match="base64") as caught:
        client.read_embeddings("####")
    assert caught.value.parameter == "prompt_embeds"


@pytest.mark.parametrize(
    "data",
    [
        npy(np.array([{"code": 1}], dtype=object)),  # a pickle
        npy(np.zeros((2, 3), np.float32))[:-4],
        npy(np.zeros((2, 3), np.int64)),
        npy(np.zeros(3, np.float32)),
        b"\x80\x02}q\x00.",
        b"PK\x03\x04",
        b"\xff" * 16,
        save({"x": np.zeros((1, 3), np.float32), "y": np.zeros((1, 3), np.float32)}),
        save({"x": np.zeros((1, 3), np.int32)}),
        b"",
    ],
)
def test_files_that_hold_no_embeddings(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_array(data)
    assert caught.value.parameter == "prompt_embeds"


def test_bfloat16_of_safetensors() -> None:
    header = b'{"x":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + np.array([0x3F80, 0xC000], np.uint16).tobytes()
    assert read_array(data).tolist() == [[1.0, -2.0]]
