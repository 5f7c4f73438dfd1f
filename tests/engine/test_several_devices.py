"""One worker that drives several devices: core sees one whole model, and each device has its shard."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from mvllm import AsyncLLM, WeightTransferGroup, WeightTransferInfo
from tests.engine.test_multiproc_parity import check_under_pressure
from tests.helpers import multi_device_platform, parity
from tests.helpers.async_engine import async_engine
from tests.helpers.multi_device_platform import MultiDevicePlatform, ShardedTensor
from tests.helpers.multi_device_plugin import VARIABLE
from tests.helpers.multimodal_suite import check, engine, generate, oracle
from tests.helpers.plugins import multi_device_platform_path, prepend
from tests.helpers.ports import free_port
from tests.helpers.thread_executor import ThreadExecutor

Drive = Callable[[int], None]


def mark_exhaustive(cases: Mapping[str, tuple[Any, ...]], *kept: str) -> list[ParameterSet]:
    """The cases; those of checkpoints not in `kept` are exhaustive tests."""
    return [
        pytest.param(*case, id=name, marks=() if case[0] in kept else pytest.mark.exhaustive)
        for name, case in cases.items()
    ]


PARTS = {
    "one embedding serves as head; heads, gates and vocabulary are cut": ("llama-mha-tied", 2),
    "one key/value head is copied to both devices, and there are biases": ("llama-mqa-biases", 2),
    "four devices for two key/value heads": ("llama-gqa", 4),
    "a vocabulary that leaves the last of four devices fewer rows": ("qwen2-odd-vocabulary", 4),
    "a vocabulary that two cannot halve, tied": ("llama-odd-vocabulary-tied", 2),
    "norms of each head, one key/value head on four devices": ("qwen3-mqa", 4),
    "norms over all heads, one of them copied": ("olmo2-mqa-biases", 2),
    "queries, keys and values in one matrix, positions in a table": ("gpt2", 2),
    "a window, and a copied head": ("mistral-window-yarn", 2),
}


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Sets the number of devices that a worker of the platform `several` drives."""
    prepend(monkeypatch, multi_device_platform_path(tmp_path))
    monkeypatch.setattr(multi_device_platform, "GATHERED", [])
    return lambda count: monkeypatch.setenv(VARIABLE, str(count))


@pytest.mark.parametrize(
    ("name", "devices"), mark_exhaustive(PARTS, "llama-mqa-biases", "qwen2-odd-vocabulary", "gpt2")
)
def test_a_model_on_several_devices_gives_the_tokens_of_transformers(drive: Drive, name: str, devices: int) -> None:
    drive(devices)
    check_under_pressure(name, devices, 1, devices, platform="several")
    assert multi_device_platform.GATHERED == [], "nobody needs a tensor whole that the devices share"


BOTH_WAYS = {
    "workers of two devices share layers": ("llama-mqa-biases", 4, 1, 2),
    "stages of two devices": ("llama-mha-tied", 2, 2, 2),
    "both": ("qwen2", 4, 2, 2),
}


@pytest.mark.parametrize(("name", "tensor", "pipeline", "devices"), mark_exhaustive(BOTH_WAYS, "qwen2"))
def test_workers_of_several_devices_share_layers_and_stages(
    drive: Drive, name: str, tensor: int, pipeline: int, devices: int
) -> None:
    drive(devices)
    threads = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
    check_under_pressure(name, tensor, pipeline, devices, platform="several", distributed_executor_backend=threads)
    assert multi_device_platform.GATHERED == []


@pytest.mark.exhaustive
def test_two_processes_of_two_devices_give_the_tokens_of_transformers(drive: Drive) -> None:
    drive(2)
    check_under_pressure("llama-gqa", 4, 1, 2, platform="several")


OTHERS: dict[str, tuple[str, bool, dict[str, object]]] = {
    "experts, each on one device": ("mixtral", True, {}),
    "experts with biases, and an extra logit for each head": ("gptoss", True, {}),
    "latents, of which every device keeps all": ("deepseek2", False, {}),
    "rounded weights": ("llama-mqa-biases", False, {"quantization": "int8"}),
    "keys of 8 bits": ("llama-gqa", True, {"kv_cache_dtype": "int8"}),
}


@pytest.mark.parametrize(("name", "stays_cut", "settings"), mark_exhaustive(OTHERS, "gptoss", "deepseek2"))
def test_two_devices_give_the_tokens_of_one(
    drive: Drive, name: str, stays_cut: bool, settings: dict[str, object]
) -> None:
    expected = parity.oracle(name, (0, 5, 8), 12)
    found = []
    for devices in (1, 2):
        drive(devices)
        with parity.engine(expected.folder, platform="several", tensor_parallel_size=devices, **settings) as llm:
            outputs = parity.generate(llm, expected.prompts, max_tokens=12)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[1] == found[0]
    assert found[0] == expected.tokens or settings
    assert multi_device_platform.GATHERED == [] or not stays_cut


def test_encoders_on_the_host_are_not_placed_on_the_devices(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """With static shapes; the operations of other devices take no tensor of the host."""
    drive(2)
    claimed = MultiDevicePlatform.capabilities.fget
    is_static = property(lambda self: dataclasses.replace(claimed(self), static_shapes=True))
    monkeypatch.setattr(MultiDevicePlatform, "capabilities", is_static)
    expected = oracle("llava")
    limits = {"max_num_batched_tokens": 24, "max_model_len": 256}
    with engine(expected.folder, platform="several", tensor_parallel_size=2, **limits) as llm:
        check(expected, generate(llm, expected.requests[:3], num_tokens=12))
        [placed] = llm.apply_model(_sharded_parts)
    assert placed == {"embed_tokens", "layers", "norm", "lm_head"}


def _sharded_parts(model: torch.nn.Module) -> set[str]:
    names = {name for name, each in model.named_parameters() if isinstance(each.data, ShardedTensor)}
    return {name.partition(".")[0] for name in names}


def test_a_trainer_counts_one_rank_for_each_worker_of_several_devices(drive: Drive) -> None:
    """Two replicas, each one worker that drives two devices."""
    drive(2)
    folder = parity.oracle("llama-gqa", (0,), 2).folder

    async def join(llm: AsyncLLM) -> None:
        info = {"master_address": "127.0.0.1", "master_port": free_port()}
        info |= {"world_size": 1 + llm.num_workers, "timeout": 120.0}
        trainer = asyncio.ensure_future(asyncio.to_thread(WeightTransferGroup, WeightTransferInfo(**info)))
        await llm.init_weight_transfer_engine(info)
        (await trainer).close()

    with async_engine(folder, platform="several", tensor_parallel_size=2, data_parallel_size=2) as llm:
        assert llm.num_workers == 2
        asyncio.run(join(llm))


def test_weights_and_cache_are_sharded_over_the_memory_of_all_devices(drive: Drive) -> None:
    folder = parity.oracle("llama-gqa", (0,), 2).folder
    blocks, held = {}, {}
    for devices in (1, 2, 4):
        drive(devices)
        gc.collect()
        before = sum(multi_device_platform.HELD.values())
        with parity.engine(
            folder,
            platform="several",
            tensor_parallel_size=devices,
            kv_cache_memory_bytes=None,
            memory_utilization=0.5,
            max_num_seqs=512,
        ) as llm:
            summary = llm.llm_engine.cache_summary
            blocks[devices] = summary.num_blocks * (
                2 if devices == 4 else 1
            )  # four devices replicate two key/value heads
            held[devices] = sum(multi_device_platform.HELD.values()) - before - summary.total_bytes * (devices > 1)
    assert held[1] == 0, "nothing is placed on one device"
    assert held[2] < held[4] < 1.5 * held[2], "norms are on each, the rest is shared; so are copies of heads"
    assert blocks[2] > 1.9 * blocks[1] and blocks[4] > 3.8 * blocks[1]
