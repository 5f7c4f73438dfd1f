"""Weights that change in a running engine: afterwards its outputs are bit for bit those of a new engine."""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from mvllm import (
    LLM,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
    SharedMemoryWeights,
    WeightTransferGroup,
    WeightTransferInfo,
)
from mvllm.engine.async_llm import AsyncLLM
from mvllm.errors import ConfigError, EngineSleepingError, PlatformError
from mvllm.messages.commands import IsSchedulerRunning
from mvllm.messages.sampling_params import RequestOutputKind
from tests.e2e.python_api_examples import example_WeightTransferGroup
from tests.engine import weight_update_extension
from tests.engine.conftest import MakeLLM
from tests.helpers.async_engine import async_engine, last
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import engine
from tests.helpers.plugins import null_platform_path, prepend
from tests.helpers.ports import free_port
from tests.helpers.processes import assert_no_new_shared_memory, shared_memory_names
from tests.helpers.thread_executor import ThreadExecutor

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11]]
LONG = {"temperature": 0, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(**LONG, max_tokens=12, logprobs=0)
THREADS = {"distributed_executor_backend": f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"}
Result = list[list[tuple[int, float]]]


def result_of(llm: LLM, lora: LoRARequest | None = None) -> Result:
    """Tokens and their log-probabilities, of prompts that the prefix cache must not answer with old values."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=lora)
    return [
        [(token, position[token].logprob) for token, position in zip(out.token_ids, out.logprobs or [], strict=True)]
        for out in (output.outputs[0] for output in outputs)
    ]


class Pair:
    """A checkpoint, and one of the same shape with other weights."""

    def __init__(self, name: str, folder: Path) -> None:
        self.old = make_checkpoint(name, folder / "old")
        self.new = changed_copy(self.old, folder / "new")

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.new)


@functools.cache
def expected(folder: Path, settings: tuple[tuple[str, Any], ...] = ()) -> Result:
    with engine(folder, **dict(settings)) as llm:
        return result_of(llm)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(llama: Pair) -> Iterator[LLM]:
    with engine(llama.old) as llm:
        yield llm


@pytest.fixture
def restored(llm: LLM, llama: Pair) -> Iterator[LLM]:
    """The engine, with the old weights at the end as at the beginning."""
    yield llm
    llm.update_weights(path=llama.old)


# ------------------------------------------------------------------------------------------------------------- sources


def from_bytes(llm: LLM, pair: Pair) -> None:
    llm.update_weights(safetensors=save(pair.tensors))


def from_shared_memory(llm: LLM, pair: Pair) -> None:
    with SharedMemoryWeights(pair.tensors) as weights:
        llm.update_weights({"shared_memory": weights.name})


def from_names_of_a_folder(llm: LLM, pair: Pair) -> None:
    names = list(pair.tensors)
    llm.start_weight_update()
    for some in (names[::2], names[1::2]):
        llm.update_weights(path=pair.new, names=some)
    llm.finish_weight_update()


SOURCES: dict[str, Callable[[LLM, Pair], None]] = {
    "folder": lambda llm, pair: llm.update_weights(path=pair.new),
    "some names at a time": from_names_of_a_folder,
    "tensors": lambda llm, pair: llm.update_weights(tensors=pair.tensors),
    "pairs": lambda llm, pair: llm.update_weights(tensors=iter(pair.tensors.items())),
    "bytes": from_bytes,
    "shared memory": from_shared_memory,
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_come_from_every_source(restored: LLM, llama: Pair, source: str) -> None:
    before = shared_memory_names()
    assert result_of(restored) == expected(llama.old)
    version = restored.weight_info()["weight_version"]
    SOURCES[source](restored, llama)
    assert result_of(restored) == expected(llama.new) != expected(llama.old)
    assert restored.weight_info() == {"weight_version": version + 1, "is_updating": False, "failure": None}
    assert_no_new_shared_memory(before)


def test_weights_come_from_a_process_group_of_the_trainer(llama: Pair) -> None:
    """The trainer is this process; each worker is a process of its own."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2, "timeout": 60.0}
    groups: list[WeightTransferGroup] = []
    with engine(llama.old, distributed_executor_backend="mp") as llm:
        with pytest.raises(RequestError, match="has joined none yet"):
            llm.update_weights(**WeightTransferGroup.describe(llama.tensors))
        joining = threading.Thread(target=lambda: groups.append(WeightTransferGroup(WeightTransferInfo(**info))))
        joining.start()
        llm.init_weight_transfer_engine(info)
        joining.join()
        sending = threading.Thread(target=groups[0].send, args=(llama.tensors,))
        sending.start()
        llm.update_weights(**WeightTransferGroup.describe(llama.tensors))
        sending.join()
        assert result_of(llm) == expected(llama.new)
        groups[0].close()
        example_WeightTransferGroup(llm, llama.tensors, free_port())


# -------------------------------------------------------------------------------------------------- families, settings

SLOW = pytest.mark.exhaustive
CASES = [
    pytest.param("llama-gqa", {"tensor_parallel_size": 2, **THREADS}, id="shards"),
    pytest.param("llama-gqa", {"pipeline_parallel_size": 3, **THREADS}, id="stages"),
    pytest.param("llama-gqa", {"quantization": "int8"}, id="int8"),
    pytest.param("llama-gqa", {"quantization": "int4"}, id="int4"),
    pytest.param("llama-gqa", {"enforce_eager": True, "async_scheduling": True}, id="eager and planned ahead"),
    pytest.param("llama-mha-tied", {}, id="tied head"),
    pytest.param("llama-mha-tied", {"quantization": "int8"}, id="quantized tied head"),
    pytest.param(
        "llama-odd-vocabulary-tied", {"tensor_parallel_size": 2, **THREADS}, id="padded shards of a tied head"
    ),
    pytest.param("mixtral", {}, id="experts"),
    pytest.param("deepseek2", {}, id="latent attention"),
    pytest.param("gemma2", {}, id="norms changed after loading"),
    pytest.param("mixtral", {"quantization": "int8"}, id="quantized experts", marks=SLOW),
    pytest.param("mixtral", {"tensor_parallel_size": 2, **THREADS}, id="shards of experts", marks=SLOW),
    pytest.param("deepseek2", {"quantization": "int8"}, id="quantized latent attention", marks=SLOW),
    pytest.param("llama-mha-tied", {"pipeline_parallel_size": 2, **THREADS}, id="stages, tied", marks=SLOW),
    pytest.param("llama-gqa", {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, id="mp", marks=SLOW),
    *(
        pytest.param(name, {}, id=name, marks=SLOW)
        for name in (
            *("qwen3next", "qwen35moe", "kimilinear", "lfm2", "olmohybrid"),
            *("mamba2", "granitehybrid", "falconh1", "nemotronh"),
            *("gpt2", "gpt2-untied", "opt", "opt-projected", "falcon-new", "gemma3", "glm4", "granite", "gptoss"),
            *("llama-many-files", "llama-without-prefix", "mistral-window", "olmo2", "phi3", "qwen2", "qwen2moe"),
            *("qwen3", "qwen3moe", "starcoder2", "deepseek3", "ernie45", "cohere2", "gemma4", "mistral4"),
        )
    ),
]

CASES += [
    pytest.param("llama4", {"quantization": "int8"}, id="quantized stacked experts", marks=SLOW),
    *(pytest.param(name, {}, id=name, marks=SLOW) for name in ("llama4", "ernie45moe", "minimaxm2", "glm4moe")),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_form_of_weights_is_that_of_a_new_engine(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    fresh = expected(pair.new, tuple(settings.items()))
    with engine(pair.old, **settings) as llm:
        before = result_of(llm)
        assert before != fresh
        llm.update_weights(tensors=pair.tensors)
        assert result_of(llm) == fresh
        llm.update_weights(path=pair.old)
        assert result_of(llm) == before


def test_weights_in_files_that_other_engines_map_are_replaced(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(llama.new)
    monkeypatch.setenv("MVLLM_CPU_SHARED_WEIGHTS", str(tmp_path / "shared"))
    with engine(llama.old) as llm, engine(llama.old) as other:
        llm.update_weights(path=llama.new)
        assert result_of(llm) == want
        assert result_of(other) == expected(llama.old)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({"model.layers.0.mlp.spare.weight": torch.zeros(1)}), "unknown tensor"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"has shape \[3\], expected \[64\]"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "has dtype I8, expected one of",
        ),
    ],
    ids=["name", "shape", "dtype"],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_nothing_is_written(
    llm: LLM, llama: Pair, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    tensors = dict(llama.tensors)
    change(tensors)
    info = llm.weight_info()
    with pytest.raises(RequestError, match=message):
        llm.update_weights(tensors=tensors)
    assert llm.weight_info() == info
    assert result_of(llm) == expected(llama.old)


def test_a_folder_without_some_weights_is_refused_unless_names_are_given(llm: LLM, llama: Pair, tmp_path: Path) -> None:
    shutil.copytree(llama.new, tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(RequestError, match=r"missing tensor 'model\.norm\.weight'"):
        llm.update_weights(path=tmp_path / "part")
    with pytest.raises(RequestError, match=r"no tensor 'model\.norm\.weight'"):
        llm.update_weights(path=tmp_path / "part", names=["model.norm.weight"])
    assert result_of(llm) == expected(llama.old)


def test_a_part_of_a_packed_module_is_refused_until_the_rest_is_there(restored: LLM, llama: Pair) -> None:
    """On this platform the three projections are packed into one matrix of 8-bit integers."""
    query, *others = (f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv")
    with engine(llama.old, quantization="int8") as llm:
        before = result_of(llm)
        with pytest.raises(RequestError, match=r"nothing was written.*lacks .*k_proj\.weight, .*v_proj\.weight"):
            llm.update_weights(path=llama.new, names=[query, "model.norm.weight"])
        assert result_of(llm) == before
        llm.start_weight_update()
        llm.update_weights(path=llama.new, names=[query, "model.norm.weight"])
        with pytest.raises(RequestError, match=r"lacks .*k_proj\.weight, .*v_proj\.weight"):
            llm.finish_weight_update()
        llm.update_weights(path=llama.new, names=others)
        with pytest.raises(RequestError, match="already loaded"):
            llm.update_weights(path=llama.new, names=[query])
        llm.finish_weight_update()
        mixed = result_of(llm)
    shutil.rmtree(llama.old.parent / "mixed", ignore_errors=True)
    folder = shutil.copytree(llama.old, llama.old.parent / "mixed")
    tensors = load_file(folder / "model.safetensors")
    tensors.update({name: llama.tensors[name] for name in (query, *others, "model.norm.weight")})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert mixed == expected(folder, (("quantization", "int8"),))


def test_calls_out_of_order_and_wrong_arguments_are_refused(restored: LLM, llama: Pair) -> None:
    llm = restored
    for ends in (llm.finish_weight_update, llm.abandon_weight_update):
        with pytest.raises(RequestError, match="No weight update is under way"):
            ends()
    for wrong in ({}, {"path": "x", "shared_memory": "y"}, {"names": ["x"]}):
        with pytest.raises(RequestError, match="exactly one of"):
            llm.update_weights(wrong)
    with pytest.raises(RequestError, match=r"nothing was written.*safetensors"):
        llm.update_weights(safetensors=b"")
    with pytest.raises(RequestError, match="update_info"):
        llm.update_weights({"folder": "x"})
    for name in ("../etc/passwd", "/", "missing"):
        with pytest.raises(RequestError, match=r"name of a segment|no shared memory"):
            llm.update_weights(shared_memory=name)
    with pytest.raises(RequestError, match="mode must be one of"):
        llm.pause_generation(mode="later")
    llm.start_weight_update()
    with pytest.raises(RequestError, match="under way"):
        llm.start_weight_update()
    with pytest.raises(RequestError, match="under way"):
        llm.resume_generation()
    with pytest.raises(RequestError, match="paused"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.abandon_weight_update()
    assert result_of(llm) == expected(llama.old)
    version = llm.weight_info()["weight_version"]
    llm.start_weight_update()
    with pytest.raises(RequestError, match="must be larger"):
        llm.finish_weight_update(weight_version=max(version, 1) - 1 or version)
    for wrong_version in (0, version + 0.5, 2**70):
        with pytest.raises(RequestError, match="must be larger"):
            llm.finish_weight_update(weight_version=wrong_version)  # type: ignore[arg-type]
    assert llm.finish_weight_update(weight_version=version + 5) == version + 5


def test_an_update_that_is_broken_off_makes_the_weights_unusable_until_a_whole_one(restored: LLM, llama: Pair) -> None:
    llm = restored
    core = llm.llm_engine
    core.add_request("running", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(**LONG, max_tokens=100))
    core.step()
    llm.start_weight_update()
    llm.update_weights(path=llama.new, names=["model.norm.weight"])
    llm.abandon_weight_update()
    outputs = [output for _ in range(4) for output in core.step()]
    assert outputs[-1].outputs[0].finish_reason == "error" and "unusable" in (outputs[-1].outputs[0].error or "")
    for asks in (lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False), llm.resume_generation):
        with pytest.raises((EngineSleepingError, RequestError), match=r"unusable|paused"):
            asks()
    with pytest.raises(RequestError, match="must have every weight"):
        llm.update_weights(path=llama.new, names=["model.norm.weight"])
    llm.update_weights(path=llama.new)
    assert result_of(llm) == expected(llama.new)


def test_a_worker_without_weight_updates_says_so(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepend(monkeypatch, null_platform_path(tmp_path / "plugins"))
    llm = make_llm(platform="null")
    ask = functools.partial(llm.generate, PROMPTS, SamplingParams(**LONG, max_tokens=3), use_tqdm=False)
    want = [output.outputs[0].token_ids for output in ask()]
    with pytest.raises(PlatformError, match="does not implement the optional method 'start_weight_update'"):
        llm.update_weights(path="anywhere")
    assert [output.outputs[0].token_ids for output in ask()] == want


# ----------------------------------------------------------------------------------------------- pause, versions, sleep


def run(llm: LLM, steps: int = 1000) -> list[RequestOutput]:
    """Runs steps until nothing is unfinished, or that many; returns the finished requests."""
    outputs: list[RequestOutput] = []
    while steps and llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.finished]
        steps -= 1
    return outputs


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_a_request_that_was_paused_continues_with_the_new_weights_and_names_its_versions(
    restored: LLM, llama: Pair, kind: RequestOutputKind, *, recompute: bool
) -> None:
    llm, version = restored, restored.weight_info()["weight_version"]
    params = SamplingParams(**LONG, max_tokens=12, output_kind=kind)
    llm.llm_engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, params)
    run(llm, 5)
    llm.pause_generation(mode="keep", clear_cache=False)
    assert llm.is_paused() and not run(llm, 3)
    llm.start_weight_update()
    llm.update_weights(path=llama.new)
    llm.finish_weight_update(reset_running_requests=recompute)
    assert llm.is_paused(), "it was paused before the update"
    llm.resume_generation()
    (output,) = run(llm)
    (old, first), (new, second) = output.outputs[0].weight_versions
    assert (old, new, first + second) == (version, version + 1, 12)
    tokens = output.outputs[0].token_ids
    assert tokens[:first] == [token for token, _ in expected(llama.old)[0]][:first]
    continued = llm.generate(
        {"prompt_token_ids": PROMPTS[0] + tokens[:first]},
        SamplingParams(**LONG, max_tokens=second),
        use_tqdm=False,
    )[0]
    assert not recompute or continued.outputs[0].token_ids == tokens[first:]
    assert recompute or continued.num_cached_tokens == 0, "keys and values of the old weights were shared"
    assert continued.outputs[0].weight_versions == [(version + 1, second)]


def test_an_update_drops_the_prefix_cache(restored: LLM, llama: Pair) -> None:
    ask = functools.partial(restored.generate, PROMPTS[0], GREEDY, use_tqdm=False)
    ask()
    assert ask()[0].num_cached_tokens > 0
    restored.update_weights(path=llama.new)
    assert ask()[0].num_cached_tokens == 0


def test_waking_up_reads_the_checkpoint_again_and_its_version_is_zero(make_llm: MakeLLM, llama: Pair) -> None:
    llm = make_llm(model=llama.old)
    llm.update_weights(path=llama.new)
    llm.sleep(1)
    llm.wake_up()
    assert result_of(llm) == expected(llama.new)
    llm.sleep(2)
    with pytest.raises(EngineSleepingError, match="The weights sleep"):
        llm.update_weights(path=llama.new)
    llm.wake_up(["weights"])
    assert llm.weight_info()["weight_version"] == 0
    llm.update_weights(path=llama.new)
    llm.wake_up()
    assert result_of(llm) == expected(llama.new)
    assert llm.weight_info()["weight_version"] == 2
    llm.start_weight_update()
    llm.update_weights(path=llama.old, names=["model.norm.weight"])
    llm.abandon_weight_update()
    llm.sleep(2)
    llm.wake_up()  # mends the weights, and the engine is as before the update that failed: not paused
    assert result_of(llm) == expected(llama.old)


def test_weights_that_move_while_the_kv_cache_sleeps_are_warmed_up_later(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = expected(llama.new)
    monkeypatch.setenv("MVLLM_CPU_SHARED_WEIGHTS", str(tmp_path / "shared"))
    with engine(llama.old) as llm:
        llm.sleep(1)
        llm.update_weights(path=llama.new)
        llm.wake_up()
        assert result_of(llm) == want


def test_adapters_are_updated_in_place(llama: Pair, tmp_path: Path) -> None:
    one, two = (write_adapter(tmp_path / str(seed), llama.old, seed=seed) for seed in (1, 2))
    with engine(llama.old, enable_lora=True) as llm:
        first, second = (result_of(llm, LoRARequest(str(i), i, str(path))) for i, path in ((1, one), (2, two)))
    assert first != second
    current = shutil.copytree(one, tmp_path / "current")
    request = LoRARequest("policy", 1, str(current))
    with engine(llama.old, enable_lora=True) as llm:
        assert result_of(llm, request) == first
        shutil.copytree(two, current, dirs_exist_ok=True)
        llm.update_lora(request)
        assert llm.weight_info()["weight_version"] == 1
        assert result_of(llm, request) == second
        moved = LoRARequest("policy", 1, str(one))
        llm.llm_engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=request)
        llm.update_lora(moved)
        (waited,) = run(llm)
        assert waited.outputs[0].token_ids == [token for token, _ in first[0]]
        assert result_of(llm, moved) == first
        llm.llm_engine.add_request("b", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=moved)
        llm.llm_engine.step()
        llm.llm_engine.add_request("c", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=moved)
        for again in (LoRARequest("policy", 1, str(two)), request):  # one runs on over both, the other one waits
            llm.update_lora(again)
        (current / "adapter_model.safetensors").write_bytes(b"damaged")
        with pytest.raises(RequestError, match="cannot be loaded"):
            llm.update_lora(request)
        assert [output.outputs[0].finish_reason for output in run(llm)] == ["length", "length"]
        assert result_of(llm, request) == second
        llm.update_lora(moved)
        assert result_of(llm, moved) == first
        llm.update_weights(tensors=llama.tensors)  # the base model, below the adapter
        both = result_of(llm, moved)
        with pytest.raises(RequestError, match="keeps the name"):
            llm.update_lora(LoRARequest("other", 1, str(two)))
    with engine(llama.new, enable_lora=True) as llm:
        assert result_of(llm, LoRARequest("fresh", 1, str(one))) == both


def test_a_replaced_adapter_that_is_loaded_again_finds_no_blocks_of_its_replacement(
    llama: Pair, tmp_path: Path
) -> None:
    one, two = (LoRARequest("policy", 1, str(write_adapter(tmp_path / str(i), llama.old, seed=i))) for i in (1, 2))
    with engine(llama.old, enable_lora=True) as llm:
        first = result_of(llm, one)
        llm.llm_engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=one)
        llm.update_lora(two)
        (waited,) = run(llm)
        assert waited.outputs[0].token_ids != [token for token, _ in first[0]]
        assert llm.llm_engine.remove_lora(1)
        assert result_of(llm, one) == first


def test_methods_of_the_user_run_on_every_worker(make_llm: MakeLLM, llama: Pair) -> None:
    path = f"{weight_update_extension.__name__}.Extension"
    llm = make_llm(model=llama.old, worker_extension_cls=path, tensor_parallel_size=2, **THREADS)
    want = float(tensors_of(llama.old)["model.norm.weight"].double().sum())
    found = llm.collective_rpc("sum_of", args=("norm.weight",), kwargs={"scale": 2.0})
    assert found == pytest.approx([2 * want, 2 * want])
    with pytest.raises(PlatformError, match=r"failed in fail: ValueError: as asked"):
        llm.collective_rpc("fail")
    for method in ("missing", "_send", "get_model"):
        with pytest.raises(ConfigError, match="workers have no method"):
            llm.collective_rpc(method)
    with pytest.raises(ConfigError, match="defines execute_model, which the worker has already"):
        make_llm(worker_extension_cls=f"{weight_update_extension.__name__}:Conflicting")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_llm(worker_extension_cls="nowhere.Extension")


# ------------------------------------------------------------------------------------------------------------- AsyncLLM


def test_a_server_pauses_in_every_mode_and_updates_between_two_steps(llama: Pair) -> None:
    async def main(llm: AsyncLLM) -> None:
        long = SamplingParams(**LONG, max_tokens=100)

        def ask(params: SamplingParams = long) -> asyncio.Task[RequestOutput]:
            return asyncio.ensure_future(last(llm.generate({"prompt_token_ids": PROMPTS[0]}, params)))

        running = ask()
        while not llm.stats.num_running:
            await asyncio.sleep(0.005)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        waiting = ask(SamplingParams(**LONG, max_tokens=3))
        await asyncio.sleep(0.05)
        assert not running.done() and not waiting.done() and llm.heartbeat_age < 60
        await llm.start_weight_update()
        await llm.update_weights(tensors=llama.tensors)
        assert await llm.finish_weight_update() == 1
        await llm.resume_generation()
        output, short = await running, await waiting
        assert [version for version, _ in output.outputs[0].weight_versions] in ([0, 1], [1])
        assert sum(count for _, count in output.outputs[0].weight_versions) == 100
        assert short.outputs[0].weight_versions == [(1, 3)]
        assert short.outputs[0].token_ids == [token for token, _ in expected(llama.new)[0]][:3]

        running = ask(SamplingParams(**LONG, max_tokens=30))
        await asyncio.sleep(0)
        await llm.pause_generation(mode="wait")
        assert len((await running).outputs[0].token_ids) == 30
        held = ask(SamplingParams(**LONG, max_tokens=3))
        await llm.resume_generation()
        assert len((await held).outputs[0].token_ids) == 3

        for _ in range(50):  # on a busy machine the request may have finished before the engine is resumed
            running = ask()
            pausing = asyncio.ensure_future(llm.pause_generation(mode="wait"))
            while await llm._client.call(IsSchedulerRunning()):
                await asyncio.sleep(0)
            await llm.resume_generation()
            [found] = await asyncio.gather(pausing, return_exceptions=True)
            assert len((await running).outputs[0].token_ids) == 100
            if found is not None:
                break
        assert isinstance(found, RequestError) and "was resumed before" in str(found)

        with pytest.raises(PlatformError, match="result of call_workers cannot be sent"):
            await llm.collective_rpc("model_itself")
        assert len(await llm.collective_rpc("sum_of", ("norm.weight",))) == 1

        running = ask()
        while not llm.stats.num_running:
            await asyncio.sleep(0.005)
        await llm.pause_generation(mode="abort")
        assert (await running).outputs[0].finish_reason == "abort"
        await llm.resume_generation()
        with pytest.raises(RequestError, match="nothing was written"):
            await llm.update_weights(path="/nowhere")
        assert (await llm.weight_info())["weight_version"] == 1

    extension = f"{weight_update_extension.__name__}.Extension"
    with async_engine(llama.old, worker_extension_cls=extension) as llm:
        asyncio.run(asyncio.wait_for(main(llm), 120))
