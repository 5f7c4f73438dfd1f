"""LIF: errors name the process that died or hung, nothing is left behind, and the next engine works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mvllm.extension_api import EngineDeadError, WorkerDiedError, WorkerStuckError
from mvllm.extension_api.testing import LLM, CacheError, EngineSleepingError, load_attribute
from mvllm.plugin_api import AttentionBackend, AttentionSpec, GraphProgram, StepSizes
from mvllm_conformance.leftover_processes import ProcessSnapshot, process_snapshot, wait_until
from mvllm_conformance.markers import clause, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import known_start_error, parallel_config, ranks_skip_reason, topology_of
from mvllm_conformance.subprocess_checks import ANSWER_PREFIX, child_environment
from mvllm_conformance.zoo import Zoo, generate, make_llm

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
LONG = {"max_tokens": 200}


@pytest.fixture
def snapshot() -> Iterator[ProcessSnapshot]:
    """Tracks the processes that a test starts, and kills those that are left at its end."""
    with process_snapshot() as found:
        yield found


def worker_settings(subject: PlatformUnderTest) -> dict[str, Any]:
    """Settings of an engine with worker processes: two if the machine supports it, else one."""
    topology = topology_of(subject, parallel_config(2))
    collectives = {"all_reduce", "all_gather"} <= subject.capabilities.collectives
    meet = collectives and not ranks_skip_reason(subject, 2) and not known_start_error(subject, 2)
    if "mp" in topology.executors and topology.num_workers == 2 and meet:
        return {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    return one_worker_settings(subject)


def one_worker_settings(subject: PlatformUnderTest) -> dict[str, Any]:
    """Settings of an engine with one worker process."""
    if "mp" not in topology_of(subject, parallel_config()).executors:
        skip_not_claimed("worker processes: the topology does not allow mp")
    return {"distributed_executor_backend": "mp"}


def generate_with_new_engine(
    subject: PlatformUnderTest, zoo: Zoo, expected: list[list[int]] | None = None
) -> list[list[int]]:
    """The tokens that a new engine in this process generates; fails if they are not the expected ones."""
    with make_llm(subject, zoo.checkpoint("llama")) as llm:
        found = [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)]
    assert expected is None or found == expected
    return found


@clause("LIF-01")
def test_a_killed_worker_is_named_and_nothing_is_left(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, snapshot: ProcessSnapshot
) -> None:
    llm = make_llm(subject, zoo.checkpoint("llama"), **worker_settings(subject))
    with llm:
        generate(llm, PROMPTS)
        workers = snapshot.workers()
        victim = workers[-1]
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"pid {victim.pid}") as caught:
            generate(llm, PROMPTS, **LONG)
        assert isinstance(caught.value.__cause__, WorkerDiedError)
    snapshot.assert_gone()


@clause("LIF-02")
def test_a_step_that_hangs_ends_the_engine_with_the_workers_name(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, snapshot: ProcessSnapshot
) -> None:
    with make_llm(subject, zoo.checkpoint("llama"), step_timeout=4, **one_worker_settings(subject)) as llm:
        generate(llm, PROMPTS)
        [victim] = snapshot.workers()
        victim.suspend()
        with pytest.raises(EngineDeadError, match=rf"pid {victim.pid}") as caught:
            generate(llm, PROMPTS, **LONG)
        assert isinstance(caught.value.__cause__, WorkerStuckError)
    snapshot.assert_gone()


@clause("LIF-03")
def test_a_step_that_raises_ends_the_engine_and_not_the_process(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate_with_new_engine(subject, zoo)
    with monkeypatch.context() as patch:
        arm = break_third_step(subject, patch)
        with make_llm(subject, zoo.checkpoint("llama")) as llm:
            arm()
            with pytest.raises(EngineDeadError, match="on purpose"):
                generate(llm, PROMPTS)
            with pytest.raises(EngineDeadError):
                generate(llm, PROMPTS)
    generate_with_new_engine(subject, zoo, expected)


def break_third_step(subject: PlatformUnderTest, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes a step raise, in attention or in the platform's worker.

    Returns:
        A function to call after profiling and warm-up. The third step after that raises.
    """
    steps: list[Iterator[int]] = []

    def maybe_raise() -> None:
        if steps and next(steps[0]) >= 2:
            raise RuntimeError("broken on purpose by the conformance suite")

    def arm() -> None:
        steps.append(iter(range(1000)))

    path = subject.platform.worker_class()
    if path is not None:
        cls = load_attribute(path)
        execute = cls.execute_model

        def execute_model(self: Any, plan: Any) -> Any:
            maybe_raise()
            return execute(self, plan)

        patch.setattr(cls, "execute_model", execute_model)
        return arm
    if subject.capabilities.graph_compiler:
        break_programs(subject, patch, maybe_raise)
        return arm
    make = type(subject.platform).attention_backend

    def attention_backend(self: Any, spec: AttentionSpec) -> AttentionBackend:
        backend = make(self, spec)
        build = backend.build_metadata

        def build_metadata(batch: Any) -> Any:
            maybe_raise()
            return build(batch)

        backend.build_metadata = build_metadata  # type: ignore[method-assign]
        return backend

    patch.setattr(type(subject.platform), "attention_backend", attention_backend)
    return arm


def break_programs(subject: PlatformUnderTest, patch: pytest.MonkeyPatch, maybe_raise: Callable[[], None]) -> None:
    """Calls `maybe_raise` whenever a program of the platform's compiler runs the graph of a model."""
    make = type(subject.platform).graph_compiler

    def graph_compiler(self: Any) -> Any:
        compiler = make(self)
        assert compiler is not None, "the platform has a graph compiler"
        compile_graphs = compiler.program

        def program(graphs: Any) -> GraphProgram:
            made = compile_graphs(graphs)
            run = made.run

            def run_or_raise(graph: str, inputs: Any, sizes: StepSizes) -> Any:
                if graph.startswith("model"):
                    maybe_raise()
                return run(graph, inputs, sizes)

            setattr(made, "run", run_or_raise)  # noqa: B010
            return made

        setattr(compiler, "program", program)  # noqa: B010
        return compiler

    patch.setattr(type(subject.platform), "graph_compiler", graph_compiler)


@clause("LIF-04")
def test_a_cache_that_does_not_fit_is_refused_and_the_next_engine_works(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo
) -> None:
    expected = generate_with_new_engine(subject, zoo)
    longest = 2**20
    with pytest.raises(CacheError):
        make_llm(
            subject,
            zoo.checkpoint("llama"),
            kv_cache_memory_bytes=2**60,
            max_num_seqs=2**16,
            max_num_batched_tokens=2**16,
            max_model_len=longest,
            hf_overrides={"max_position_embeddings": longest},
        ).close()
    generate_with_new_engine(subject, zoo, expected)


@clause("LIF-05")
def test_an_engine_with_worker_processes_leaves_nothing_however_often_it_is_closed(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, snapshot: ProcessSnapshot
) -> None:
    llm = make_llm(subject, zoo.checkpoint("llama"), **worker_settings(subject))
    generate(llm, PROMPTS)
    assert snapshot.workers()
    llm.close()
    llm.close()
    snapshot.assert_gone()


@clause("LIF-05")
def test_an_engine_in_this_process_may_be_closed_twice(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, snapshot: ProcessSnapshot
) -> None:
    topology = topology_of(subject, parallel_config())
    if "uni" not in topology.executors:
        skip_not_claimed("an engine in this process: the topology does not allow uni")
    llm: LLM = make_llm(subject, zoo.checkpoint("llama"))
    generate(llm, PROMPTS)
    llm.close()
    llm.close()
    snapshot.assert_gone()


@clause("LIF-06")
def test_workers_end_with_their_caller(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, snapshot: ProcessSnapshot
) -> None:
    settings = {"name": subject.name, "folder": str(zoo.checkpoint("llama")), **worker_settings(subject)}
    caller = subprocess.Popen(
        [sys.executable, "-m", "mvllm_conformance._engine_process", json.dumps(settings)],
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = []
        assert caller.stdout is not None
        for line in caller.stdout:
            output.append(line)
            if line.startswith(ANSWER_PREFIX):
                break
        else:
            pytest.fail("the engine did not start:\n" + "".join(output[-40:]), pytrace=False)
        workers = snapshot.workers()
        assert workers
    finally:
        caller.kill()
        caller.stdout.close()  # type: ignore[union-attr]
        caller.wait()
    wait_until(lambda: not snapshot.workers(), 30, "workers are alive after their engine's process was killed")
    snapshot.assert_gone()


@clause("LIF-07")
@pytest.mark.parametrize("level", [1, 2])
def test_awake_again_an_engine_gives_the_same_tokens(
    subject: PlatformUnderTest, free_device: None, zoo: Zoo, level: int
) -> None:
    path = subject.platform.worker_class()
    if path is not None and not hasattr(load_attribute(path), "sleep"):
        skip_not_claimed("sleep: the platform's worker has no method `sleep`")
    with make_llm(subject, zoo.checkpoint("llama")) as llm:
        expected = [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)]
        for _ in range(2):
            llm.sleep(level)
            with pytest.raises(EngineSleepingError):
                generate(llm, PROMPTS)
            llm.wake_up()
            assert [list(output.outputs[0].token_ids) for output in generate(llm, PROMPTS)] == expected
