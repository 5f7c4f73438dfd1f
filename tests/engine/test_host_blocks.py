"""Blocks and states that workers copy to host memory, and back to other places, give the same bits as before."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM
from tests.helpers import parity
from tests.helpers.host_block_plans import HostBlockDriver
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.plugins import example_platform_path, prepend
from tests.helpers.thread_executor import ThreadExecutor

PROMPT = [2 + 7 * i % 300 for i in range(41)]
more = partial(pytest.param, marks=pytest.mark.exhaustive)
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes checkpoints of the zoo, each once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("host-blocks") / name)
        return made[name]

    return make


def start(stack: ExitStack, folder: Path, **settings: Any) -> LLM:
    return stack.enter_context(parity.engine(folder, **{"kv_cache_memory_bytes": 2**21, "max_num_seqs": 4} | settings))


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "qwen2-layer-types",  # groups with sliding windows
        "deepseek32",  # MLA and indexers
        "bamba",  # states beside keys and values
        "mamba2",  # states only
    ],
)
def test_copied_blocks_and_states_give_the_same_bits(stack: ExitStack, folder_of: Any, name: str) -> None:
    driver = HostBlockDriver(start(stack, folder_of(name)))
    driver.check_round_trip(PROMPT)
    assert (driver.blocks is None) == (name == "mamba2") and (driver.states is None) == (
        name not in ("bamba", "mamba2")
    )


@pytest.mark.parametrize("kv_cache_dtype", [more("bfloat16"), "int8", more("float8_e4m3fn")])
def test_every_storage_dtype_is_copied(stack: ExitStack, folder_of: Any, kv_cache_dtype: str) -> None:
    llm = start(stack, folder_of("llama-gqa"), kv_cache_dtype=kv_cache_dtype)
    driver = HostBlockDriver(llm)
    driver.check_round_trip(PROMPT)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("llama-gqa", 2, 1),
        ("llama-gqa", 1, 2),
        ("bamba", 2, 2),
        more("llama-gqa", 2, 2),
        more("bamba", 2, 1),
        more("bamba", 1, 2),
    ],
)
def test_every_rank_copies_its_part(stack: ExitStack, folder_of: Any, name: str, tp: int, pp: int) -> None:
    llm = start(
        stack,
        folder_of(name),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend=THREADS,
    )
    driver = HostBlockDriver(llm)
    assert len(driver.needs) == tp * pp
    driver.check_round_trip(PROMPT)


@pytest.mark.exhaustive
def test_worker_processes_map_the_host_blocks(stack: ExitStack, folder_of: Any) -> None:
    llm = start(
        stack,
        folder_of("llama-gqa"),
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        distributed_executor_backend="mp",
    )
    HostBlockDriver(llm).check_round_trip(PROMPT)


@pytest.mark.parametrize("level", [more(1), 2])
def test_host_blocks_stay_mapped_while_the_engine_sleeps(stack: ExitStack, folder_of: Any, level: int) -> None:
    llm = start(stack, folder_of("bamba"))
    driver = HostBlockDriver(llm)
    driver.check_round_trip(PROMPT)
    needs = driver.needs
    llm.sleep(level)
    llm.wake_up()
    assert driver.executor.collective_rpc("host_block_needs") == needs
    driver.check_round_trip(PROMPT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_that_keep_sampled_tokens_on_the_device_copy_as_well(
    stack: ExitStack, folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    prepend(monkeypatch, example_platform_path(tmp_path / "plugins"))
    llm = start(
        stack,
        folder_of("bamba"),
        platform="example",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        async_scheduling=asynchronous,
    )
    HostBlockDriver(llm).check_round_trip(PROMPT)
