"""LoRA adapters: the engine's outputs with them equal those of transformers with the merged weights."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, LoRARequest, RequestError, RequestOutput, SamplingParams
from mvllm.engine.core import lora_manager
from mvllm.engine.frontend import lora_request_validator
from mvllm.errors import ConfigError
from mvllm.ops.lora import add_lora_by_slot
from mvllm.plugin_api import OpProvider
from mvllm_cpu.platform import CPUPlatform
from tests.e2e.python_api_examples import example_LoRARequest
from tests.helpers.lora_adapters import check_against, edit_config, merged, write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import engine
from tests.helpers.thread_executor import ThreadExecutor
from tests.helpers.threads import run_in_threads
from tests.helpers.zoo_recent import QUICK

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"
BASE = "base"


def draw_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 320) for _ in range(length)] for length in lengths]


PROMPTS = draw_prompts((5, 17, 33, 48))


class Family:
    """A checkpoint, three adapters for it, and transformers' model with each of them merged."""

    def __init__(self, folder: Path, name: str, targets: tuple[str, ...]) -> None:
        self.checkpoint = make_checkpoint(name, folder / name)
        self.paths = {
            "one": write_adapter(folder / "one", self.checkpoint, targets=targets, seed=1),
            "two": write_adapter(
                folder / "two",
                self.checkpoint,
                targets=targets[:2],
                rank=3,
                seed=2,
                ranks={targets[0]: 8},
                alpha_pattern={targets[1]: 3},
                dtype=torch.bfloat16,
            ),
            "three": write_adapter(folder / "three", self.checkpoint, targets=targets[1:], seed=3, use_rslora=True),
        }
        self.models = {name: merged(self.checkpoint, self.paths.get(name)) for name in (BASE, *self.paths)}

    def request(self, name: str) -> LoRARequest | None:
        if name == BASE:
            return None
        return LoRARequest(name, list(self.paths).index(name) + 1, str(self.paths[name]))

    def generate(self, llm: LLM, prompts: list[list[int]], names: list[str]) -> list[RequestOutput]:
        """Outputs of `prompts`, each with the adapter at the same index, compared with transformers."""
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[self.request(name) for name in names])
        for name, output in zip(names, outputs, strict=True):
            assert output.lora_request == self.request(name)
            check_against(self.models[name], [output], name)
        return outputs


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    targets = ("q_proj", "up_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    return Family(tmp_path_factory.mktemp("lora"), "llama-gqa", targets)


@pytest.fixture(scope="module")
def llm(llama: Family) -> Iterator[LLM]:
    with engine(llama.checkpoint, enable_lora=True, max_loras=3, max_num_batched_tokens=24) as llm:
        yield llm


EVERYONE = [BASE, "one", "two", "three"]


@pytest.mark.shows("lora", family="llama")
def test_several_adapters_and_the_model_itself_in_one_batch(llm: LLM, llama: Family) -> None:
    # 24 tokens per step: long prompts are cut into chunks, and one step has requests of several adapters.
    prompts = [prompt for prompt in PROMPTS for _ in EVERYONE]
    outputs = llama.generate(llm, prompts, EVERYONE * len(PROMPTS))
    by_prompt = [outputs[i : i + 4] for i in range(0, len(outputs), 4)]
    for four in by_prompt:  # otherwise the test would be vacuous
        assert len({tuple(output.outputs[0].token_ids) for output in four}) == 4


def test_the_example_of_the_python_api_runs(llm: LLM, llama: Family) -> None:
    example_LoRARequest(llm, str(llama.paths["one"]))


def test_a_cached_prefix_is_reused_only_with_the_same_adapter(llm: LLM, llama: Family) -> None:
    [prompt] = draw_prompts((40,), seed=9)
    for name in EVERYONE:
        [output] = llama.generate(llm, [prompt], [name])
        assert output.num_cached_tokens == 0, name
    for name in EVERYONE:
        [output] = llama.generate(llm, [prompt], [name])
        assert output.num_cached_tokens == 32, name


def test_adapters_beyond_max_loras_wait_and_are_reloaded(llama: Family) -> None:
    with engine(llama.checkpoint, enable_lora=True, max_loras=1, kv_cache_memory_bytes=2**18) as llm:
        names = [*EVERYONE, *reversed(EVERYONE)] * 2
        prompts = draw_prompts((30,) * len(names), seed=4)
        llama.generate(llm, prompts, names)
        assert llm.llm_engine.stats is not None and llm.llm_engine.list_loras() == {1, 2, 3}


def test_outputs_are_the_same_under_preemption(llama: Family) -> None:
    with engine(
        llama.checkpoint,
        enable_lora=True,
        max_loras=3,
        block_size=16,
        kv_cache_memory_bytes=16 * 16 * 3 * 2 * 2 * 16 * 4,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, detokenize=False)
        names = EVERYONE * 2
        prompts = draw_prompts((31,) * len(names), seed=5)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[llama.request(name) for name in names])
        for name, output in zip(names, outputs, strict=True):
            check_against(llama.models[name], [output], name)
        assert llm.llm_engine.stats is not None and llm.llm_engine.stats.num_preemptions > 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_outputs_are_the_same_over_ranks(llama: Family, tensor: int, pipeline: int) -> None:
    with engine(
        llama.checkpoint,
        enable_lora=True,
        max_loras=2,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        distributed_executor_backend=THREADS,
    ) as llm:
        llama.generate(llm, PROMPTS, EVERYONE)


@pytest.mark.parametrize(("tensor", "rows"), [(1, 24), (2, 64)])
def test_a_platform_that_reads_adapters_on_the_device(
    tensor: int, rows: int, llama: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer calls its operation once per step, whatever adapters the step has."""
    calls: list[tuple[int, ...]] = []

    def by_slot(*arguments: Any) -> torch.Tensor:
        calls.append(tuple(arguments[4].unique().tolist()))
        return add_lora_by_slot(*arguments)

    provider = OpProvider("add_lora_by_slot", "by slot", by_slot, lambda case: [])
    monkeypatch.setattr(CPUPlatform, "ops", lambda self, ops=CPUPlatform.ops: [*ops(self), provider])
    with engine(
        llama.checkpoint,
        enable_lora=True,
        max_loras=3,
        max_num_batched_tokens=rows,
        tensor_parallel_size=tensor,
        distributed_executor_backend=THREADS if tensor > 1 else None,
    ) as llm:
        calls.clear()
        llama.generate(llm, PROMPTS, EVERYONE)
    assert {-1, 0, 1, 2} in [set(slots) for slots in calls]
    num_layers, products_per_layer = 3, 4
    assert len(calls) % (num_layers * products_per_layer) == 0


@pytest.mark.shows("lora")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen2", ("q_proj", "down_proj", "v_proj", "gate_proj")),
        ("gpt2", ("c_attn", "c_proj", "c_fc")),
        ("opt", ("q_proj", "fc1", "k_proj", "out_proj", "fc2")),
        *(
            pytest.param(name, ("q_proj", "down_proj", "k_proj", "o_proj"), marks=pytest.mark.exhaustive)
            for name in (*QUICK, "gemma4-keys-are-values")
        ),
    ],
)
def test_other_families_give_the_outputs_of_the_merged_weights(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    family = Family(tmp_path, name, targets)
    with engine(family.checkpoint, enable_lora=True, max_loras=3) as llm:
        family.generate(llm, PROMPTS[:2] * 4, [name for name in EVERYONE for _ in range(2)])


@pytest.mark.exhaustive
@pytest.mark.shows("lora")
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(
            (name, 1)
            for name in ("glm4moe", "minimaxm2", "ernie45moe", "hunyuanmoe", "llama4-interleaved", "exaonemoe")
        ),
        ("glm4moe", 2),
        ("llama4-interleaved", 2),
    ],
)
def test_large_mixtures_give_the_outputs_of_the_merged_weights(name: str, tensor: int, tmp_path: Path) -> None:
    """Adapters of the attention, of dense layers and of shared experts."""
    family = Family(tmp_path, name, ("q_proj", "down_proj", "k_proj", "o_proj"))
    executor = THREADS if tensor > 1 else None
    settings = {"tensor_parallel_size": tensor, "distributed_executor_backend": executor}
    with engine(family.checkpoint, enable_lora=True, max_loras=3, **settings) as llm:
        family.generate(llm, PROMPTS[:2] * 4, [name for name in EVERYONE for _ in range(2)])


def test_adapters_work_with_quantized_weights(llama: Family) -> None:
    """Quantized weights differ from transformers', so there is no merged reference. The test checks that an adapter
    with zero weights changes no token, and that one with large weights does."""
    with engine(llama.checkpoint, enable_lora=True, quantization="int8") as llm:
        plain, other = (
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=llama.request(name))[0].outputs[0]
            for name in (BASE, "one")
        )
        assert plain.token_ids != other.token_ids
        # int8 rounding changes log-probabilities little: the adapter has its full effect.
        reference = torch.log_softmax(
            llama.models["one"](torch.tensor([PROMPTS[0]])).logits[0, -1].float().detach(), dim=-1
        )
        assert other.logprobs is not None
        for token, entry in other.logprobs[0].items():
            assert abs(entry.logprob - float(reference[token])) < 0.3


def test_threads_generate_with_their_own_adapters(llm: LLM, llama: Family) -> None:
    work = [partial(llama.generate, llm, PROMPTS[i:], [name] * len(PROMPTS[i:])) for i, name in enumerate(EVERYONE)]
    assert [type(found) for found in run_in_threads(*work)] == [list] * len(EVERYONE)


def test_records_of_adapters_are_bounded(llm: LLM, llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_manager, lora_request_validator):
        monkeypatch.setattr(module, "MAX_ADAPTER_RECORDS", 6)
    manager = llm.llm_engine._client._core._lora.require()  # type: ignore[union-attr]
    path = str(llama.paths["one"])
    for i in range(10, 30):
        request = LoRARequest(f"copy-{i}", i, path)
        [output] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=request)
        check_against(llama.models["one"], [output], request.lora_name)
        assert len(llm.llm_engine.list_loras()) <= 6 and i in llm.llm_engine.list_loras()
        assert len(manager._file_states) <= 6 + len(manager.ids)
    for i in range(1, 10):
        llm.update_lora(LoRARequest("copy-29", 29, path + "/" * i))
    assert len(manager._replaced) == 6
    llm.llm_engine.remove_lora(29)
    llama.generate(llm, PROMPTS, EVERYONE)


def test_after_level_2_sleep_adapters_are_reloaded(llm: LLM, llama: Family) -> None:
    llm.sleep(2)
    llm.wake_up()
    llama.generate(llm, PROMPTS[:2], ["one", "two"])


def test_a_step_without_adapters_runs_without_lora(llm: LLM, llama: Family) -> None:
    runner = llm.llm_engine._client._core._executor._worker._worker.runner  # type: ignore[union-attr]
    calls: list[bool] = []
    decoder = runner._forward.decoder
    eager = decoder.call_model

    def note(*args: object) -> torch.Tensor:
        calls.append(runner.loader.lora_manager.step.batch is not None)
        return eager(*args)

    decoder.call_model = note
    try:
        llama.generate(llm, PROMPTS[:1], [BASE])
        assert not any(calls)
        llama.generate(llm, PROMPTS[:1], ["one"])
        assert all(calls) and calls
    finally:
        del decoder.call_model


# ----------------------------------------------------------------------------------------------------------- errors


def expect_rejection(llm: LLM, request: object, *words: str) -> None:
    with pytest.raises(RequestError) as info:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=request)  # type: ignore[arg-type]
    assert info.value.parameter == "lora_request"
    for word in words:
        assert word in str(info.value), str(info.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_invalid_lora_request_is_rejected_without_side_effects(llm: LLM, llama: Family, tmp_path: Path) -> None:
    good = str(llama.paths["one"])
    expect_rejection(llm, LoRARequest("x", 0, good), "lora_int_id")
    expect_rejection(llm, LoRARequest("", 9, good), "lora_name")
    expect_rejection(llm, LoRARequest("x", 9, str(tmp_path / "nowhere")), "no adapter folder")
    expect_rejection(llm, LoRARequest("x", 9, "a\0b"), "lora_path")
    expect_rejection(llm, "one", "LoRARequest(")
    expect_rejection(llm, LoRARequest(["x"], 9, good), "lora_name")  # type: ignore[arg-type]
    llama.generate(llm, PROMPTS[:1], ["one"])
    expect_rejection(llm, LoRARequest("another", 1, good), "id 1 belongs to 'one'")
    with pytest.raises(RequestError, match="a list of 2 for 1 prompts"):
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=[None, None])


def test_target_modules_are_names_of_the_checkpoint(tmp_path):
    """A list of common names: Granite 4 has no down_proj, which is its class's name of `shared_mlp.output_linear`."""
    checkpoint = make_checkpoint("granitehybrid-dense", tmp_path / "model")
    path = write_adapter(tmp_path / "one", checkpoint, targets=("q_proj", "down_proj"))
    with engine(checkpoint, enable_lora=True) as llm:
        outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=LoRARequest("one", 1, str(path)))
    check_against(merged(checkpoint, path), outputs)


def test_an_adapter_of_another_model_or_a_damaged_one_is_rejected(llm: LLM, llama: Family, tmp_path: Path) -> None:
    number = 10

    def adapter(name: str, **settings: object) -> Path:
        return write_adapter(tmp_path / name, llama.checkpoint, **settings)  # type: ignore[arg-type]

    def expect(folder: Path, *words: str) -> None:
        nonlocal number
        number += 1
        expect_rejection(llm, LoRARequest(folder.name, number, str(folder)), folder.name, *words)

    other = make_checkpoint("llama-head-dim", tmp_path / "other")
    expect(write_adapter(tmp_path / "wrong-shape", other, targets=("k_proj",)), "k_proj", "belongs to another model")
    expect(adapter("not-finite", targets=("q_proj",), size=float("nan")), "NaN")
    expect(adapter("too-large", targets=("q_proj",), size=1e38, alpha=1e5), "too large")
    expect(adapter("head", targets=("lm_head",)), "lm_head", "is not a linear layer")
    incomplete = adapter("incomplete", targets=("q_proj",))
    edit_config(incomplete, target_modules=["q_proj", "o_proj"])
    expect(incomplete, "incomplete", "o_proj")
    expect(adapter("rank", targets=("q_proj",), rank=17), "max_lora_rank")
    llama.generate(llm, PROMPTS, EVERYONE)  # the loaded adapters are intact


def test_changed_or_missing_adapter_files_fail_only_the_request_that_needs_them(llama: Family, tmp_path: Path) -> None:
    targets = ("q_proj",)
    doomed = write_adapter(tmp_path / "doomed", llama.checkpoint, targets=targets, seed=6)
    with engine(llama.checkpoint, enable_lora=True, max_loras=1) as llm:
        request = LoRARequest("doomed", 8, str(doomed))
        before = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=request)[0]
        check_against(merged(llama.checkpoint, doomed), [before])
        llama.generate(llm, PROMPTS[:1], ["one"])  # takes the only slot
        (doomed / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
        adapters = [None, request, llama.request("one")]
        outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, lora_request=adapters, raise_on_error=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert "doomed" in (outputs[1].outputs[0].error or "")
        for name, output in zip((BASE, "one"), outputs[::2], strict=True):
            check_against(llama.models[name], [output], name)
        (tmp_path / "elsewhere").rename(doomed / "adapter_model.safetensors")
        again = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=request)[0]
        assert again.outputs[0].token_ids == before.outputs[0].token_ids

        # The prefix cache has KV computed with the old files, even after the adapter was removed.
        assert llm.llm_engine.remove_lora(8)
        shutil.rmtree(doomed)
        write_adapter(doomed, llama.checkpoint, targets=targets, seed=7)
        with pytest.raises(RequestError, match="have changed since they were first read"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=request)
        other = LoRARequest("doomed", 9, str(doomed))
        [output] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=other)
        check_against(merged(llama.checkpoint, doomed), [output])


def test_a_lora_request_without_enable_lora_is_an_error(llama: Family) -> None:
    with engine(llama.checkpoint) as llm:
        expect_rejection(llm, llama.request("one"), "enable_lora")
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        LLM(str(llama.checkpoint), enable_lora=True, max_loras=4, max_cpu_loras=2)
