"""Programs in a process of their own: results, errors, and processes that end while they are needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from plugins.graph.tests.numpy_compiler import KILLED_BY, linear_graph

from mvllm.errors import PlatformError
from mvllm_graph import GraphProgram, ProcessCompiler, StepSizes
from mvllm_graph.program_process import compiler_pids

SIZES = StepSizes(tokens=5, requests=1, pages=1, logits_rows=1, max_query_len=5, max_seq_len=5)
X = np.arange(20, dtype=np.float32).reshape(5, 4)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCompiler]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    made = ProcessCompiler("plugins.graph.tests.numpy_compiler:NumpyCompiler")
    yield made
    made.close()


def program_with(compiler: ProcessCompiler, first: float) -> tuple[GraphProgram, np.ndarray]:
    """A program, and its weight, which starts with `first`."""
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    weight[0, 0] = first
    program = compiler.program([linear_graph()])
    program.set_weight("w", weight)
    program.finish_weights()
    return program, weight


def check(compiler: ProcessCompiler, first: float) -> GraphProgram:
    program, weight = program_with(compiler, first)
    [result] = program.run("model", {"x": X}, SIZES)
    np.testing.assert_array_equal(program.to_host(result), X @ weight.T)
    return program


def test_programs_share_a_process_without_torch(compiler: ProcessCompiler) -> None:
    first, pid = check(compiler, 2.0), compiler.pid
    check(compiler, 3.0)
    assert compiler.pid == pid and pid in compiler_pids()
    assert "torch" not in compiler.modules()
    with pytest.raises(MemoryError, match="7 blocks"):
        first.allocate_caches(7, 16)
    compiler.close()
    assert compiler.pid is None and pid not in compiler_pids()


def test_a_process_that_is_killed_between_calls_is_replaced(compiler: ProcessCompiler) -> None:
    lost, pid = check(compiler, 2.0), compiler.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(PlatformError, match=rf"pid {pid}.*SIGKILL \(exit code -9\).*Start the engine again"):
            lost.run("model", {"x": X}, SIZES)
    check(compiler, 5.0)
    assert compiler.pid not in (None, pid)
    with pytest.raises(PlatformError, match=rf"pid {pid}"):
        lost.set_weight("w", X)
    lost.close()


def test_a_process_that_is_killed_while_it_runs_is_replaced(compiler: ProcessCompiler) -> None:
    lost, _ = program_with(compiler, KILLED_BY)
    pid = compiler.pid
    with pytest.raises(PlatformError, match=r"SIGKILL.*give the engine less memory"):
        lost.run("model", {"x": X}, SIZES)
    assert compiler.pid is None and not psutil.pid_exists(pid or 0)
    check(compiler, 5.0)


def test_results_of_a_lost_process_do_not_reach_the_next_one(compiler: ProcessCompiler) -> None:
    lost, _ = program_with(compiler, 1.0)
    results = lost.run("model", {"x": X}, SIZES)
    assert compiler.pid is not None
    os.kill(compiler.pid, signal.SIGKILL)
    program, weight = program_with(compiler, 3.0)
    del results
    [result] = program.run("model", {"x": X}, SIZES)
    np.testing.assert_array_equal(program.to_host(result), X @ weight.T)


def test_a_compiler_that_cannot_be_made_is_an_error_each_time(compiler: ProcessCompiler) -> None:
    absent = ProcessCompiler("plugins.graph.tests.numpy_compiler:NoSuchCompiler")
    for _ in range(2):
        with pytest.raises(PlatformError, match="NoSuchCompiler"):
            absent.program([linear_graph()])
