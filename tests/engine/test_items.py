"""Items of prompts (images as rows of embeddings) in a whole engine: the tokens that transformers gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvllm import LLM
from mvllm.errors import RequestError
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import bytes_of_blocks
from tests.helpers.toy_items import (
    Picture,
    Prompt,
    expected,
    install,
    outcomes_of,
    picture,
    request,
    run,
    toy_engine,
    write,
)

MORE = pytest.mark.exhaustive
TEXT: Prompt = [3 + i * 7 % 200 for i in range(40)]
ONE: Prompt = [*TEXT[:10], picture(1), *TEXT[10:20]]
TWO: Prompt = [*TEXT[:7], picture(2, 33), 9, picture(3, 5), *TEXT[20:26]]
FIRST: Prompt = [picture(4, 17), *TEXT[:3]]
LAST: Prompt = [*TEXT[:20], picture(5, 12)]
PROMPTS = {"one": ONE, "two": TWO, "first": FIRST, "last": LAST, "text": TEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[str, list[int]]:
    return {name: expected(folder, prompt) for name, prompt in PROMPTS.items()}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "plugin", monkeypatch)


def requests() -> list:
    return [request(name, prompt) for name, prompt in PROMPTS.items()]


def num_encoded(llm: LLM) -> int:
    """Items that the encoder has computed."""
    [count] = llm.llm_engine.apply_model(lambda model: model.item_encoder.num_encoded)
    return count


def test_alone_and_in_a_batch_with_text(folder: Path, oracle: dict[str, list[int]]) -> None:
    with toy_engine(folder) as llm:
        for name, prompt in PROMPTS.items():
            assert run(llm, [request(name, prompt)]) == {name: oracle[name]}
    with toy_engine(folder) as llm:
        assert run(llm, requests()) == oracle
        assert num_encoded(llm) == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 11, "max_num_seqs": 8},
        {"max_num_batched_tokens": 11, "max_num_seqs": 8, "async_scheduling": True},
        pytest.param({"max_num_batched_tokens": 3, "max_num_seqs": 3, "enable_prefix_caching": False}, marks=MORE),
        pytest.param({"async_scheduling": True, "max_num_seqs": 2}, marks=MORE),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        pytest.param({"enforce_eager": True, "max_num_batched_tokens": 24}, marks=MORE),
    ],
    ids=str,
)
def test_chunk_boundaries_and_schedules(folder: Path, oracle: dict[str, list[int]], settings: dict[str, Any]) -> None:
    with toy_engine(folder, **settings) as llm:
        assert run(llm, requests()) == oracle


@MORE
def test_a_draft_model_and_an_engine_core_process(folder: Path, oracle: dict[str, list[int]]) -> None:
    draft = make_checkpoint("llama-gqa", folder.with_name("draft"), seed=1, tokenizer=False)
    speculative = {"model": str(draft), "num_speculative_tokens": 2}
    for settings in ({"speculative_config": speculative, "max_num_batched_tokens": 24}, {"engine_core_process": True}):
        with toy_engine(folder, **settings) as llm:
            assert run(llm, requests()) == oracle


def test_preempted_requests_encode_again(folder: Path, oracle: dict[str, list[int]]) -> None:
    with toy_engine(folder) as llm:
        memory = bytes_of_blocks(llm, 14)
    with toy_engine(folder, kv_cache_memory_bytes=memory, enable_prefix_caching=False) as llm:
        assert run(llm, requests()) == oracle
        assert llm.llm_engine._client._core.make_stats().num_preemptions > 0


@pytest.mark.parametrize("num_cached", [16, 32, pytest.param(48, marks=MORE), 64])
def test_prefix_hits_before_in_and_after_an_item(folder: Path, num_cached: int) -> None:
    prompt: Prompt = [*TEXT[:18], picture(8, 40), *TEXT[18:24]]  # the item has the positions 18 to 58
    with toy_engine(folder) as llm:
        core = llm.llm_engine._client._core
        run(llm, [request("first", prompt, 1)])
        pool = core.scheduler._kv_cache._pool
        for block in sorted(pool.cached_blocks())[num_cached // 16 :]:
            pool.evict(block)
        assert run(llm, [request("again", prompt)]) == {"again": expected(folder, prompt)}
        assert core.make_stats().prefix_cache_hits == num_cached
        assert num_encoded(llm) == 1


def test_the_same_text_with_another_item_shares_nothing_behind_it(folder: Path) -> None:
    first: Prompt = [*TEXT[:18], picture(10), *TEXT[18:24]]
    second: Prompt = [*TEXT[:18], picture(11), *TEXT[18:24]]
    with toy_engine(folder) as llm:
        found = {**run(llm, [request("first", first)]), **run(llm, [request("second", second)])}
        assert found == {"first": expected(folder, first), "second": expected(folder, second)}
        assert found["first"] != found["second"]
        assert llm.llm_engine._client._core.make_stats().prefix_cache_hits == 16  # the text before the items
        assert num_encoded(llm) == 2


def test_the_same_item_in_two_requests_is_encoded_once(folder: Path) -> None:
    shown = picture(12)
    prompts: dict[str, Prompt] = {"a": [*TEXT[:3], shown, 9, shown], "b": [*TEXT[3:9], shown, 8]}
    with toy_engine(folder) as llm:
        assert run(llm, [request(name, prompt) for name, prompt in prompts.items()]) == {
            name: expected(folder, prompt) for name, prompt in prompts.items()
        }
        assert num_encoded(llm) == 1
        stats = llm.llm_engine._client._core.make_stats()
        assert (stats.encoder_cache_queries, stats.encoder_cache_hits, stats.encoder_cache_rows) == (3, 2, 20)
        assert sum(stats.encoder_steps) == 1 and stats.encoder_seconds > 0


def test_ready_embeddings_need_no_encoder(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from mvllm.messages.multimodal import ArrayData

    shown = picture(13)
    weight = load_file(folder / "model.safetensors")["toy.projector.weight"]
    embeds = (torch.from_numpy(shown.patches) @ weight.T).numpy()
    prompt: Prompt = [*TEXT[:5], shown, 3]
    ready = request("ready", prompt)
    ready.items[0].modality = "embeds"
    ready.items[0].features = {"embeds": ArrayData("float32", list(embeds.shape), embeds.tobytes())}
    with toy_engine(folder) as llm:
        assert run(llm, [ready]) == {"ready": expected(folder, prompt)}
        assert num_encoded(llm) == 0


def test_an_encoder_that_fails_fails_its_request_only(folder: Path, oracle: dict[str, list[int]]) -> None:
    patches = picture(14).patches.copy()
    patches[0, 0] = np.inf
    infinite, without_memory = Picture(patches), Picture(np.full_like(patches, np.nan))
    wrong = request("wrong size", [3, picture(15), 4])
    wrong.items[0].features["patches"].shape[0] -= 1
    wrong.items[0].features["patches"].data = wrong.items[0].features["patches"].data[:-32]
    bad = [request("infinite", [3, infinite, 4]), request("memory", [4, without_memory, 4]), wrong]
    for settings in ({}, {"async_scheduling": True}):
        with toy_engine(folder, **settings) as llm:
            found = outcomes_of(llm, [*bad, *requests()])
            assert {name: found.pop(name) for name in ("infinite", "memory", "wrong size")} == {
                "infinite": "An item of modality 'image' cannot be encoded: an image of infinite brightness.",
                "memory": "An item of modality 'image' does not fit into the device's memory: no memory for this "
                "image.",
                "wrong size": "An item of modality 'image' cannot be encoded: the encoder returned embeddings of shape "
                "(19, 64), where the prompt has a place for (20, 64).",
            }
            assert found == oracle
            assert run(llm, [request("again", ONE)]) == {"again": oracle["one"]}


def test_sleep_and_a_reset_drop_results(folder: Path, oracle: dict[str, list[int]]) -> None:
    with toy_engine(folder) as llm:
        run(llm, [request("before", ONE)])
        llm.sleep(level=1)
        llm.wake_up()
        assert run(llm, requests()) == oracle
        assert num_encoded(llm) == 6
        run(llm, [request("without prefix hits", ONE, cache_salt="a")])
        assert num_encoded(llm) == 6
        assert llm.reset_mm_cache()
        assert run(llm, [request("without encoder hits", ONE, cache_salt="b")]) == {
            "without encoder hits": oracle["one"]
        }
        assert num_encoded(llm) == 7


@MORE
def test_a_text_only_engine_refuses_items(folder: Path) -> None:
    with toy_engine(make_checkpoint("llama-gqa", folder.with_name("text"), tokenizer=False)) as llm:
        with pytest.raises(RequestError, match="text only"):
            llm.llm_engine._client.add_request(request("image", ONE))


ROPE: dict[str, Prompt] = {
    "behind": [*TEXT[:9], picture(20, 20, (tuple([0] * 10 + [4] * 11), 5)), *TEXT[:7]],
    "two": [picture(21, 12, ((0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6), 7)), 4, picture(22, 3, ((0, 1, 1, 1), 2)), 9, 8],
    "text": TEXT,
}


@contextmanager
def rope_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> Iterator[LLM]:
    install(tmp_path / "rope", monkeypatch, rope_sections=(2, 3, 3))
    with toy_engine(folder, **settings) as llm:
        yield llm


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=MORE),
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        pytest.param({"async_scheduling": True}, marks=MORE),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=str,
)
def test_rotary_positions_within_and_behind_items(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with rope_engine(folder, monkeypatch, tmp_path, **settings) as llm:
        assert run(llm, [request(name, prompt) for name, prompt in ROPE.items()]) == {
            name: expected(folder, prompt) for name, prompt in ROPE.items()
        }


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("executor", ["tests.helpers.thread_executor.ThreadExecutor", pytest.param("mp", marks=MORE)])
def test_several_ranks(
    folder: Path,
    oracle: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: str,
    executor: str,
) -> None:
    settings = {size: 2, "distributed_executor_backend": executor, "max_num_batched_tokens": 24}
    with rope_engine(folder, monkeypatch, tmp_path, **settings) as llm:
        assert run(llm, requests()) == oracle
        prompts = {name: ROPE[name] for name in ("behind", "two")}
        assert run(llm, [request(name, prompt) for name, prompt in prompts.items()]) == {
            name: expected(folder, prompt) for name, prompt in prompts.items()
        }


def test_an_encoder_that_fails_on_the_first_stage_fails_its_request(folder: Path, oracle: dict[str, list[int]]) -> None:
    patches = picture(14).patches.copy()
    patches[0, 0] = np.inf
    executor = "tests.helpers.thread_executor.ThreadExecutor"
    with toy_engine(folder, pipeline_parallel_size=2, distributed_executor_backend=executor) as llm:
        found = outcomes_of(llm, [request("bad", [3, Picture(patches), 4]), *requests()])
        assert "cannot be encoded: an image of infinite brightness" in str(found.pop("bad"))
        assert found == oracle
