"""The whole engine on a device that is not the host, with its own memory and rules, through the contract only. Core's
assumptions about devices beyond the contract fail here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mvllm import LLM, LoRARequest, SamplingParams
from mvllm.errors import (
    CacheError,
    EngineDeadError,
    EngineSleepingError,
    ModelError,
    PlatformError,
    WorkerDiedError,
    WorkerStuckError,
)
from mvllm.platform.choose import choose_platform
from tests.helpers import parity
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.plugins import ROOT, example_platform_path, prepend
from tests.helpers.processes import TAG, assert_nothing_left, new_tag, shared_memory_names

PROMPTS = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 32}  # cuts prompts into chunks
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 256}  # would use 12 MiB of cache
BYTES_PER_BLOCK = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, key and value, heads, head size, float32

Make = Callable[..., LLM]


@pytest.fixture
def plugin_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    path = example_platform_path(tmp_path / "plugins")
    prepend(monkeypatch, path)
    for name in ("FAULT_INJECTION", "MVLLM_EXAMPLE_DEVICES", "MVLLM_EXAMPLE_MEMORY", "MVLLM_EXAMPLE_MODE"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
def make(checkpoint: Path, plugin_path: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds engines with one worker process per device; upper-case settings are the plugin's environment variables."""
    tag = new_tag()
    monkeypatch.setenv(TAG, tag)
    before = shared_memory_names()
    with ExitStack() as stack:

        def build(model: Path = checkpoint, **settings: object) -> LLM:
            for name in [name for name in settings if name.isupper()]:
                monkeypatch.setenv(name, str(settings.pop(name)))
            given = {"platform": "example", "distributed_executor_backend": "mp", **TIGHT, **settings}
            return stack.enter_context(parity.engine(model, **given))

        yield build
    assert_nothing_left(tag, before)


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, raise_on_error=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


# ------------------------------------------------------------------------------------------------------- correct tokens


@pytest.mark.parametrize(
    "names",
    [
        ("llama-gqa",),
        # The suite tests operations of states and sparse attention on this device.
        pytest.param(("mamba2", "glm5"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_worker_in_the_engines_process_gives_the_tokens_of_transformers(
    plugin_path: list[str], names: tuple[str, ...]
) -> None:
    path = os.pathsep.join([*plugin_path, *(folder for folder in sys.path if folder)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.example_device_parity", *names],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-len(names) :] == [f"{name} is equal" for name in names]


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("gpt2", 1, 2),
        *(pytest.param(*layout, marks=pytest.mark.exhaustive) for layout in [("llama-gqa", 1, 2), ("gpt2", 2, 1)]),
    ],
)
def test_worker_processes_give_the_tokens_of_transformers(make: Make, name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name)
    llm = make(expected.folder, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    parity.check(expected, parity.generate(llm, expected.prompts[:8]))


@pytest.mark.parametrize(
    "mode", ["static", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("lazy", "eager"))]
)
def test_modes_give_the_same_tokens_and_core_keeps_their_rules(make: Make, mode: str) -> None:
    """Mode `static` raises on a shape that the warm-up has not compiled, mode `lazy` on a step that was not ended."""
    expected = parity.oracle("llama-gqa")
    llm = make(expected.folder, tensor_parallel_size=2, MVLLM_EXAMPLE_MODE=mode)
    parity.check(expected, parity.generate(llm, expected.prompts[:8]))
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True, detokenize=False)
    assert all(len(tokens) == 5 for tokens in run(llm, params))


def test_prompt_log_probabilities_of_a_short_model_need_no_shape_beyond_the_warm_up(
    make: Make, checkpoint: Path
) -> None:
    """The largest buckets exceed the model's positions; a prompt may have any number of logits rows."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": [5 + i % 7 for i in range(length)]} for length in (2, 6, 20)]

    def values(llm: LLM) -> list[list[float]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            [entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
            for o in outputs
        ]

    with parity.engine(checkpoint, platform="cpu", max_model_len=26) as elsewhere:
        free = values(elsewhere)
    static = values(make(max_model_len=26, MVLLM_EXAMPLE_MODE="static"))
    assert [len(row) for row in static] == [1, 5, 19]
    for found, expected in zip(static, free, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


# --------------------------------------------------------------------------------------------------------------- memory


def test_the_cache_is_sized_by_the_devices_free_memory(make: Make) -> None:
    limit = 4 << 20
    llm = make(MVLLM_EXAMPLE_MEMORY=limit, kv_cache_memory_bytes=None, **MANY)
    summary = llm.llm_engine.cache_summary
    assert limit // 4 < summary.num_blocks * BYTES_PER_BLOCK < limit, "this device's memory, not the machine's"
    assert all(len(tokens) == 12 for tokens in run(llm)), "and it is really there"


def test_out_of_memory_at_start_is_an_error_that_names_the_settings(make: Make) -> None:
    with pytest.raises(
        ModelError, match=r"cannot be allocated on the device: out of memory on example:0.*quantization"
    ):
        make(MVLLM_EXAMPLE_MEMORY=20_000)
    with pytest.raises(CacheError, match=r"KV cache of \d+ blocks .* cannot be allocated .*out of memory on example:0"):
        make(MVLLM_EXAMPLE_MEMORY=2 << 20, kv_cache_memory_bytes=3 << 20, **MANY)


class DeviceBytes:
    """Worker extension: the device's memory in use."""

    def device_bytes(self) -> int:
        memory: int = self.runtime.memory().used_by_me  # type: ignore[attr-defined]
        return memory

    def bytes_to_offload(self) -> int:
        weights = self._weights_to_offload(1)  # type: ignore[attr-defined]
        return int(weights.num_bytes)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tensor_parallel_size": 2, "with_draft": False}, id="shards", marks=pytest.mark.exhaustive),
        pytest.param(
            {"with_draft": True, "kv_offloading_size": 0.01, "quantization": "int8"},
            id="quantized, with a draft model and host blocks",
        ),
        pytest.param({"pipeline_parallel_size": 2, "with_draft": False}, id="stages", marks=pytest.mark.exhaustive),
    ],
)
def test_sleep_level_1_frees_the_weights_and_restores_them_with_captured_steps_and_adapters(
    make: Make, checkpoint: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    if settings.pop("with_draft"):
        settings["speculative_config"] = {"model": str(checkpoint), "num_speculative_tokens": 2}
    llm = make(
        MVLLM_EXAMPLE_MODE="replay",
        enable_lora=True,
        worker_extension_cls=f"{DeviceBytes.__module__}.{DeviceBytes.__name__}",
        kv_cache_memory_bytes=1 << 20,
        **settings,
    )
    adapter = LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter", checkpoint, targets=("q_proj",))))
    other = LoRARequest("other", 2, str(tmp_path / "adapter"))

    def results() -> list[list[int]]:
        outputs = [
            *llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapter),
            *llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected, awake = results(), llm.collective_rpc("device_bytes")
    needed = llm.collective_rpc("bytes_to_offload")
    assert expected[: len(PROMPTS)] != expected[len(PROMPTS) :], "the adapter shows"
    for tags in (["weights"], None):
        llm.sleep(1)
        asleep = llm.collective_rpc("device_bytes")
        assert all(now < 0.1 * (before - (1 << 20)) for now, before in zip(asleep, awake, strict=True)), (asleep, awake)
        with pytest.raises(EngineSleepingError):
            llm.llm_engine.add_lora(other)
        if tags is not None:
            llm.wake_up(tags)
            with_weights = llm.collective_rpc("device_bytes")
            assert all(now < before - (1 << 19) for now, before in zip(with_weights, awake, strict=True))
            of_weights = [now - before for now, before in zip(with_weights, asleep, strict=True)]
            assert all(0.9 * size < need < 1.1 * size for need, size in zip(needed, of_weights, strict=True))
        llm.wake_up()
        assert results() == expected
    again = llm.collective_rpc("device_bytes")
    assert all(now < 1.1 * before for now, before in zip(again, awake, strict=True)), (again, awake)


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.exhaustive  # test_multiproc_faults has it; the device's own faults are those of the two tests below
def test_a_worker_that_raises_ends_the_engine_with_its_error(make: Make) -> None:
    llm = make(tensor_parallel_size=2, FAULT_INJECTION="raise@execute:rank=1,step=3")
    with pytest.raises(EngineDeadError, match=r"Worker_TP1 .*execute_model of step 3: .*InjectedFault"):
        run(llm)


def test_a_worker_that_exits_is_named_with_its_status(make: Make) -> None:
    llm = make(FAULT_INJECTION="exit@execute:step=2,status=7")
    with pytest.raises(EngineDeadError) as caught:
        run(llm)
    assert isinstance(caught.value.__cause__, WorkerDiedError) and "7" in str(caught.value.__cause__)


@pytest.mark.exhaustive
def test_a_worker_that_hangs_is_found_by_the_steps_deadline(make: Make) -> None:
    llm = make(tensor_parallel_size=2, step_timeout=10, FAULT_INJECTION="hang@execute:rank=1,step=2")
    with pytest.raises(EngineDeadError) as caught:
        run(llm)
    assert isinstance(caught.value.__cause__, WorkerStuckError)


def test_a_step_without_memory_fails_its_requests_with_a_hint_and_no_later_ones(make: Make) -> None:
    llm = make(FAULT_INJECTION="oom@execute:step=2")
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False, raise_on_error=False)]
    assert [len(output.token_ids) for output in outputs] == [2] * 4, "two steps went well"
    for output in outputs:
        assert output.finish_reason == "error" and output.error is not None
        assert re.search(r"out of memory on example:0: \d+ bytes .*max_num_batched_tokens \(now", output.error)
    assert run(llm) == run(make(FAULT_INJECTION="none"))


def test_a_rank_without_memory_ends_the_ranks_that_wait_for_it(make: Make) -> None:
    llm = make(tensor_parallel_size=2, step_timeout=50, FAULT_INJECTION="oom@execute:rank=1,step=2")
    with pytest.raises(EngineDeadError, match=r"out of memory on example:1: \d+ bytes were asked for"):
        run(llm)


def test_nan_fails_the_requests_of_that_step_and_no_later_ones_and_a_slow_rank_changes_no_token(make: Make) -> None:
    llm = make(FAULT_INJECTION="nan@execute:step=2")
    assert [len(tokens) for tokens in run(llm)] == [2] * 4, "two steps went well"
    expected = run(llm)
    assert [len(tokens) for tokens in expected] == [12] * 4
    slow = make(tensor_parallel_size=2, FAULT_INJECTION="slow@execute:rank=1,step=3,seconds=0.02")
    assert run(slow) == expected


# ---------------------------------------------------------------------------------------------------------------- rules


def test_a_worker_without_a_device_is_rejected(make: Make) -> None:
    with pytest.raises(PlatformError, match=r"Rank 1 is worker 1 of this machine, which has 1 devices"):
        make(tensor_parallel_size=2, MVLLM_EXAMPLE_DEVICES=1)


def test_the_platform_runs_only_if_it_is_named(plugin_path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MVLLM_PLATFORM", raising=False)
    assert choose_platform().platform.spec.name == "cpu"
    assert choose_platform("example").platform.spec.name == "example"
