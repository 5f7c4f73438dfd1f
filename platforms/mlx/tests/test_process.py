"""The process of the compiler: without torch, with MLX; failures, and the end."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: python3 ci/matrix.py run mlx installs it")

from mvllm.plugin_api import AttentionSpec, PlatformError, StateTensor
from mvllm_graph import CacheValue, Node, ProcessCompiler, StateValue, StepGraph, StepSizes, Value
from mvllm_mlx.compiler import TABLE

SIZES = StepSizes(tokens=5, requests=1, pages=1, logits_rows=1, max_query_len=5, max_seq_len=5)


@pytest.fixture
def compiler():
    made = ProcessCompiler("mvllm_mlx.compiler:MLXCompiler")
    yield made
    made.close()


def product(columns=4):
    x, weight = Value("x", "step", ("T", columns), "float32"), Value("w", "weight", (3, columns), "float32")
    node = Node("linear", ("x", "w", None), (Value("y", "result", ("T", 3), "float32"),))
    return StepGraph("model", (x, weight), (node,), ("y",))


def check(compiler, columns):
    program = compiler.program([product(columns)])
    random = np.random.default_rng(columns)
    weight, x = (random.standard_normal((rows, columns), np.float32) for rows in (3, 5))
    program.set_weight("w", weight)
    program.finish_weights()
    [result] = program.run("model", {"x": x}, SIZES)
    np.testing.assert_allclose(program.to_host(result), x @ weight.T, rtol=1e-4, atol=1e-4)
    program.close()


def test_it_has_mlx_and_not_torch(compiler):
    check(compiler, 4)
    modules = {name.partition(".")[0] for name in compiler.modules()}
    assert "mlx" in modules and "torch" not in modules
    assert compiler.operations() == TABLE.keys()


def test_messages_may_be_larger_than_all_before_them(compiler):
    for columns in (4, 4096, 64):
        check(compiler, columns)


def test_an_error_names_its_cause_and_the_process_goes_on(compiler):
    graph = product()
    unknown = StepGraph("model", graph.inputs, (Node("no_such", ("x",), graph.nodes[0].outputs),), ("y",))
    assert compiler.unsupported(unknown) == ["MLXCompiler does not translate the operation 'no_such'."]
    with pytest.raises(PlatformError, match="no_such"):
        compiler.program([unknown])
    check(compiler, 4)


def test_a_process_that_is_killed_is_an_error_of_the_platform(compiler):
    program = compiler.program([product()])
    os.kill(compiler.pid, signal.SIGKILL)
    with pytest.raises(PlatformError, match=r"SIGKILL \(exit code -9\)"):
        program.finish_weights()
    check(compiler, 4)


def test_it_ends_when_its_compiler_is_closed(compiler):
    compiler.operations()
    process = psutil.Process(compiler.pid)
    compiler.close()
    assert compiler.pid is None and not process.is_running()


def test_caches_and_states_that_do_not_fit_are_refused_and_the_process_goes_on(compiler):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_dtype="float32", scale=0.125)
    cache = CacheValue("cache.0", "cache", (), "float32", spec, 0)
    tensor = StateTensor((4, 64, 64), "float32")
    state = StateValue("state.0.0", "state", (), "float32", tensor, 0, 0)
    graph = product()
    program = compiler.program([StepGraph("model", (*graph.inputs, cache, state), graph.nodes, ("y",))])
    pid, total = compiler.pid, psutil.virtual_memory().total
    with pytest.raises(MemoryError, match=r"blocks of the KV cache do not fit: [\d,]+ bytes are needed"):
        program.allocate_caches(4 * total // (16 * program.kv_layout(cache).bytes_per_token), 16)
    with pytest.raises(MemoryError, match=r"states of \d+ sequences do not fit"):
        program.allocate_states(4 * total // (4 * 64 * 64 * 4))
    program.allocate_caches(2, 16)
    program.allocate_states(2)
    assert program.kv_bytes(cache) == 32 * program.kv_layout(cache).bytes_per_token and compiler.pid == pid
