"""A sleeping engine frees memory; after waking up it gives the same outputs."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from mvllm import LLM, ModelError, PlatformError, RequestError, SamplingParams
from mvllm.errors import EngineSleepingError, RequestFailedError
from mvllm.platform.capabilities import Capabilities
from mvllm.worker import host_weights, worker
from tests.engine.conftest import MakeLLM
from tests.helpers.changed_weights import changed_copy
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.plugins import null_platform_path, prepend
from tests.helpers.processes import wait_until
from tests.helpers.thread_executor import ThreadExecutor

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "head_dim": 64}
WEIGHTS = 4 * (3 * 768 * 2048 + 2 * 768 * 256 + 2 * 768 * 128) * 4  # bytes, without the embeddings
CACHE = 40 << 20


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def resident() -> int:
    """Resident memory without file-backed pages, which change with the libraries' code in use."""
    info = psutil.Process().memory_info()
    return info.rss - info.shared


@pytest.mark.serial
def test_each_level_frees_the_documented_memory(make_llm: MakeLLM) -> None:
    llm = make_llm(
        hf_overrides=WIDE,
        load_format="dummy",
        kv_cache_memory_bytes=CACHE,
        max_num_seqs=512,
        max_num_batched_tokens=512,
    )
    expected = tokens(llm)
    gc.collect()  # garbage of earlier tests; nothing of the measured engine
    cache = llm.llm_engine.cache_summary.total_bytes
    assert cache > 0.9 * CACHE
    llm.sleep(1)
    weights_alone = resident()
    llm.wake_up()
    there = lambda: resident() > weights_alone + 0.9 * cache  # noqa: E731  (touched while nobody computes)
    wait_until(there, 60, lambda: f"a cache of {cache} bytes does not show: {resident()} after {weights_alone}")
    llm.sleep(1)
    assert resident() < weights_alone + 0.1 * cache
    llm.wake_up()
    assert tokens(llm) == expected
    llm.sleep(2)
    assert resident() < weights_alone - 0.9 * WEIGHTS
    llm.wake_up()
    assert tokens(llm) == expected
    llm.sleep(1)
    assert resident() < weights_alone + 0.2 * WEIGHTS, "some weights are there twice"


THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
ENGINES = {
    "as it is": {},
    "planned ahead": {"async_scheduling": True, "enforce_eager": True},
    "shards": {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS},
    "stages": {"pipeline_parallel_size": 3, "distributed_executor_backend": THREADS},
    "quantized": {"quantization": "int8"},
}
KEPT = {("as it is", 1), ("as it is", 2), ("planned ahead", 2), ("shards", 2), ("quantized", 2)}
"""Engines and levels that every run tests."""


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        pytest.param(
            settings, level, id=f"{name}-{level}", marks=() if (name, level) in KEPT else pytest.mark.exhaustive
        )
        for name, settings in ENGINES.items()
        for level in (1, 2)
    ],
)
def test_after_waking_up_tokens_are_the_same_and_the_prefix_cache_is_empty(
    make_llm: MakeLLM, settings: dict[str, object], level: int
) -> None:
    llm = make_llm(**settings)
    expected = tokens(llm)
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    for _ in range(2):
        llm.sleep(level)
        llm.wake_up()
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in again] == expected
        assert again[0].num_cached_tokens == 0


def test_a_sleeping_engine_rejects_requests_and_has_aborted_those_in_flight(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = tokens(llm)
    engine = llm.llm_engine
    engine.add_request("long", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    llm.sleep()
    assert engine.is_sleeping and not engine.has_unfinished_requests()
    for ask in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.encode(PROMPTS)):
        with pytest.raises(EngineSleepingError, match="wake_up"):
            ask()
    llm.sleep()  # no effect
    llm.sleep(2)  # frees more
    llm.wake_up()
    assert not engine.is_sleeping
    llm.wake_up()
    assert tokens(llm) == expected


def test_weights_wake_up_before_the_kv_cache(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = tokens(llm)
    llm.sleep(2)
    with pytest.raises(RequestError, match="while the weights sleep"):
        llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])
    assert llm.llm_engine.is_sleeping
    with pytest.raises(EngineSleepingError):
        llm.generate(PROMPTS, GREEDY)
    llm.wake_up(["kv_cache"])
    assert tokens(llm) == expected


def test_other_levels_are_rejected(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for level in (0, 3, "1", True, None):
        with pytest.raises(RequestError, match="must be 1 or 2"):
            llm.sleep(level)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="weights and kv_cache"):
        llm.wake_up(["everything"])
    assert not llm.llm_engine.is_sleeping


def test_a_missing_checkpoint_keeps_it_asleep_until_it_is_restored(make_llm: MakeLLM, tmp_path: Path) -> None:
    folder = make_checkpoint("gpt2", tmp_path / "gpt2")
    llm = make_llm(model=folder)
    expected = tokens(llm)
    llm.sleep(2)
    weights = folder / "model.safetensors"
    weights.rename(folder / "elsewhere")
    with pytest.raises(ModelError):
        llm.wake_up()
    assert llm.llm_engine.is_sleeping
    (folder / "elsewhere").rename(weights)
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"distributed_executor_backend": "mp"},
        pytest.param({"engine_core_process": True, "tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["a worker", "an engine core and two workers"],
)
def test_engines_with_separate_processes_sleep_as_well(make_llm: MakeLLM, settings: dict[str, object]) -> None:
    llm = make_llm(**settings)
    expected = tokens(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up(["weights"])
        with pytest.raises(EngineSleepingError):
            llm.generate(PROMPTS, GREEDY)
        llm.wake_up()
        assert tokens(llm) == expected


def test_a_worker_without_sleep_and_pooling_raises_errors_and_keeps_working(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepend(monkeypatch, null_platform_path(tmp_path / "plugins"))
    llm = make_llm(platform="null")
    expected = tokens(llm)
    with pytest.raises(PlatformError, match="does not implement the optional method 'sleep'"):
        llm.sleep()
    assert not llm.llm_engine.is_sleeping
    with pytest.raises(RequestFailedError, match="does not support pooling"):
        llm.encode([[5, 6]], use_tqdm=False)
    assert tokens(llm) == expected


# -------------------------------------------------------------------------------------------- weights in host memory


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 1 moves the weights of the CPU platform, as it does those of devices with a memory of their own."""
    monkeypatch.setattr(Capabilities, "offloads_weights", property(lambda self: True))


def test_level_1_keeps_updated_weights_and_their_version(make_llm: MakeLLM, offloading: None, tmp_path: Path) -> None:
    llm = make_llm(enforce_eager=True)
    old = tokens(llm)
    changed = changed_copy(Path(llm.model_config.path), tmp_path / "changed")
    llm.update_weights(path=changed)
    expected = tokens(llm)
    assert expected != old
    llm.sleep(1)
    with pytest.raises(EngineSleepingError, match="weights sleep"):
        llm.update_weights(path=changed)
    with pytest.raises(EngineSleepingError, match="weights sleep"):
        llm.apply_model(type)
    with pytest.raises(RequestError, match="while the weights sleep"):
        llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])
    assert llm.weight_info()["weight_version"] == 1
    llm.sleep(1)  # the KV cache sleeps already
    llm.wake_up()
    assert tokens(llm) == expected and llm.weight_info()["weight_version"] == 1
    llm.sleep(1)
    llm.sleep(2)  # drops the copy
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm) == old and llm.weight_info()["weight_version"] == 0


def test_level_1_is_refused_without_host_memory_before_anything_is_lost(
    make_llm: MakeLLM, offloading: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(enforce_eager=True)
    expected, engine = tokens(llm), llm.llm_engine
    engine.add_request("long", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "free_host_memory", lambda: 1000)
        with pytest.raises(RequestError, match=r"host memory: 1 workers .* are free\. Use level 2"):
            llm.sleep(1)
    assert not engine.is_sleeping
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].finish_reason in (None, "length")

    with monkeypatch.context() as patch:
        patch.setattr(host_weights.HostWeights, "offload", lambda self: _no_memory())
        with pytest.raises(ModelError, match="no memory after all"):
            llm.sleep(1)
    assert tokens(llm) == expected, "it is awake"


def _no_memory() -> None:
    raise ModelError("no memory after all")
