"""A whole engine with worker processes of a fault-injection platform: errors, and engines that continue after them.

The caller's view does not depend on the place of the engine core. The gate runs the core in a separate process, so that
a fault crosses one more process boundary; test_example_device runs it in this process, and `ci/dev.py test --all` both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, SamplingParams
from mvllm.errors import CacheError, EngineDeadError, PlatformError, WorkerDiedError, WorkerError, WorkerStuckError
from tests.helpers.plugins import fault_platform_path, prepend
from tests.helpers.processes import (
    TAG,
    assert_nothing_left,
    new_tag,
    shared_memory_names,
    stop_process,
    wait_until,
    worker_processes,
)

PROMPTS = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

MakeLLM = Callable[..., LLM]
Settings = dict[str, Any]

HERE, OWN_PROCESS = {"engine_core_process": False}, {"engine_core_process": True}
in_both = pytest.mark.parametrize(
    "core",
    [
        pytest.param(HERE, id="core here", marks=pytest.mark.exhaustive),
        pytest.param(OWN_PROCESS, id="core in its own process"),
    ],
)


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    prepend(monkeypatch, fault_platform_path(tmp_path / "plugins"))
    tag = new_tag()
    monkeypatch.setenv(TAG, tag)
    before = shared_memory_names()
    with ExitStack() as stack:

        def build(faults: str = "none", **settings: object) -> LLM:
            monkeypatch.setenv("FAULT_INJECTION", faults)
            given = {
                "platform": "faulty",
                "tensor_parallel_size": 2,
                "kv_cache_memory_bytes": 1 << 22,
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "use_tqdm_on_load": False,
                **settings,
            }
            return stack.enter_context(LLM(str(checkpoint), **given))

        yield build
    assert_nothing_left(tag, before)


def run(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_tokens_are_those_of_one_process_and_a_fault_of_one_engine_affects_no_other(make: MakeLLM) -> None:
    alone = make(tensor_parallel_size=1)
    expected = run(alone)
    assert run(make(tensor_parallel_size=1, distributed_executor_backend="mp")) == expected
    broken = make("exit@execute:rank=1,step=2")
    with pytest.raises(EngineDeadError):
        run(broken)
    assert run(alone) == expected


@pytest.mark.parametrize(
    ("phase", "activity", "core"),
    [
        ("init_device", "init_device", HERE),
        pytest.param("load", "load_model", HERE, marks=pytest.mark.exhaustive),
        ("load", "load_model", OWN_PROCESS),
    ],
)
def test_a_worker_that_fails_to_start_gives_the_caller_its_own_error(
    make: MakeLLM, phase: str, activity: str, core: Settings
) -> None:
    with pytest.raises(
        PlatformError,
        match=rf"Worker_TP1 \(rank 1, pid \d+\) failed in {activity}: .*InjectedFault: .* {phase} of rank 1",
    ) as caught:
        make(f"raise@{phase}:rank=1", **core)
    assert "faults.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("rank", "core"),
    [*(pytest.param(rank, HERE, marks=pytest.mark.exhaustive) for rank in (0, 1)), (1, OWN_PROCESS)],
)
def test_a_worker_that_raises_in_a_step_ends_the_engine_with_its_error(
    make: MakeLLM, rank: int, core: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `platform`: this one has a device, and the CPU platform is the host. Only its workers raise this."""
    with caplog.at_level("INFO", logger="mvllm"):
        llm = make(f"raise@execute:rank={rank},step=3", platform=None, **core)
    assert "it has a device, cpu is the host; to choose: --platform faulty or --platform cpu" in caplog.text
    for _ in range(2):
        with pytest.raises(
            EngineDeadError, match=rf"Worker_TP{rank} .*execute_model of step 3: .*InjectedFault"
        ) as caught:
            run(llm)
    assert isinstance(caught.value.__cause__, WorkerError | EngineDeadError)


@in_both
def test_a_worker_that_exits_in_a_step_is_named_though_its_peer_fails_too(make: MakeLLM, core: Settings) -> None:
    llm = make("exit@execute:rank=1,step=3,status=7", **core)
    with pytest.raises(
        EngineDeadError, match=r"Worker_TP1 .*exited with status 7 during execute_model of step 3"
    ) as caught:
        run(llm)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerDiedError)
    assert (cause.rank, cause.exit_code, cause.activity) == (1, 7, "execute_model of step 3")


@pytest.mark.parametrize(
    ("kind", "core"),
    [*(pytest.param(kind, HERE, marks=pytest.mark.exhaustive) for kind in ("hang", "spin")), ("hang", OWN_PROCESS)],
)
def test_a_step_that_hangs_ends_with_the_rank_and_its_stack(make: MakeLLM, kind: str, core: Settings) -> None:
    llm = make(f"{kind}@execute:rank=1,step=3", step_timeout=10, **core)
    with pytest.raises(EngineDeadError) as caught:
        run(llm)
    assert isinstance(caught.value.__cause__, WorkerStuckError)
    message = str(caught.value)
    assert re.search(r"Worker_TP1 \(rank 1, pid \d+\) .*execute_model of step 3", message)
    assert re.search(r"faults\.py.*in happen", message)


def test_a_core_process_reports_a_stopped_worker_at_the_time_limit(make: MakeLLM) -> None:
    llm = make(step_timeout=10, **OWN_PROCESS)
    run(llm)
    (worker,) = worker_processes(os.environ[TAG], "Worker_TP1")
    stop_process(worker.pid)
    with pytest.raises(
        EngineDeadError, match=rf"Worker_TP1 \(rank 1, pid {worker.pid}\) has not finished its step .*stopped"
    ) as caught:
        run(llm)
    assert isinstance(caught.value.__cause__, WorkerStuckError)
    assert caught.value.__cause__.rank == 1


def test_a_stopped_core_is_named_and_ended(make: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mvllm.engine.process.launched_core_connection.TIMEOUT_MARGIN_SECONDS", 1.0)
    llm = make(tensor_parallel_size=1, step_timeout=5, **OWN_PROCESS)
    (core,) = worker_processes(os.environ[TAG], "EngineCore")
    stop_process(core.pid)
    with pytest.raises(
        EngineDeadError,
        match=rf"EngineCore \(pid {core.pid}\) has given no sign of life within 6 s; it is in idle .*stopped",
    ):
        run(llm)
    wait_until(lambda: not core.is_running(), 120, "the stopped core is gone")


@in_both
def test_a_step_of_nan_ends_its_requests_and_not_the_engine(make: MakeLLM, core: Settings) -> None:
    llm = make("nan@execute:rank=-1,step=3", **core)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, raise_on_error=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    assert all(len(tokens) == 12 for tokens in run(llm))


WANTED = {"max_num_seqs": 2048, "max_model_len": 256, "memory_utilization": 0.9, "kv_cache_memory_bytes": None}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_the_rank_with_the_least_memory_decides_how_many_blocks_all_have(make: MakeLLM, rank: int) -> None:
    poor = make(f"poor@memory:rank={rank},free={200 << 20}", **WANTED).llm_engine.cache_summary
    assert poor.num_blocks > 0
    assert poor.total_bytes <= 100 << 20, "half of the free memory of that rank: two ranks share one memory"


def test_a_slow_rank_changes_nothing_but_the_time(make: MakeLLM) -> None:
    llm = make("slow@execute:rank=1,step=2,seconds=0.05", **WANTED)
    rich = llm.llm_engine.cache_summary
    assert rich.total_bytes > 200 << 20, "no rank is short of memory"
    assert run(llm) == run(make(tensor_parallel_size=1))


def test_a_rank_without_memory_for_one_sequence_fails_the_start(make: MakeLLM) -> None:
    with pytest.raises(CacheError, match="max_model_len"):
        make(f"poor@memory:rank=1,free={16 << 20}", **WANTED)


def test_a_step_that_finds_no_memory_on_one_rank_ends_the_engine_with_the_reason(make: MakeLLM) -> None:
    """The other rank waits in a collective, and does not report whether it has failed as well."""
    llm = make("oom@execute:rank=1,step=2", step_timeout=60.0)
    with pytest.raises(
        EngineDeadError, match=r"Worker_TP1 .*execute_model of step 2: A step does not fit .*: injected"
    ):
        run(llm)


def test_a_step_that_finds_no_memory_on_any_rank_fails_its_requests_and_the_engine_goes_on(make: MakeLLM) -> None:
    llm = make("oom@execute:rank=-1,step=2")
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False, raise_on_error=False):
        assert output.outputs[0].finish_reason == "error"
        assert re.search(
            r"A step does not fit .*: injected.*Lower max_num_batched_tokens", str(output.outputs[0].error)
        )
    assert run(llm) == run(make(tensor_parallel_size=1))
