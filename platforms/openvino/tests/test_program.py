"""Programs: weights in place, new weights, results in a graph's dtype, KV caches that are allocated again."""

from __future__ import annotations

import pytest

pytest.importorskip("openvino", reason="openvino is not installed: python3 ci/matrix.py run openvino installs it")

import numpy as np
import torch

from mvllm.plugin_api import PlatformError
from mvllm_graph import Node, StepGraph, StepSizes, Value
from mvllm_openvino.compiler import OpenVINOCompiler
from mvllm_openvino.program import settings

SIZES = StepSizes(2, 1, 1, 1, 2, 2)


def product(dtype="float32", rows=2):
    inputs = (Value("x", "step", ("T", 3), dtype), Value("w", "weight", (rows, 3), dtype))
    node = Node("linear", ("x", "w", None), (Value("y", "result", ("T", rows), dtype),))
    return StepGraph("model", inputs, (node,), ("y",))


def bits(tensor):
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


def test_a_weight_that_is_set_again_takes_effect():
    program = OpenVINOCompiler().program([product()])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for weight in (np.ones((2, 3), np.float32), np.eye(2, 3, dtype=np.float32)):
        program.set_weight("w", weight)
        program.finish_weights()
        [y] = program.run("model", {"x": x}, SIZES)
        np.testing.assert_allclose(program.to_host(y), x @ weight.T)


def test_results_of_one_run_are_arguments_of_another_and_later_runs_do_not_change_them():
    program = OpenVINOCompiler().program([product(rows=3)])
    weight = np.diag([1.0, 2.0, 3.0]).astype(np.float32)
    program.set_weight("w", weight)
    program.finish_weights()
    x = np.ones((2, 3), np.float32)
    [first] = program.run("model", {"x": x}, SIZES)
    [second] = program.run("model", {"x": first}, SIZES)
    np.testing.assert_allclose(program.to_host(first), x @ weight)
    np.testing.assert_allclose(program.to_host(second), x @ weight @ weight)


def test_memory_of_a_result_is_used_again_once_nobody_refers_to_it():
    program = OpenVINOCompiler().program([product()])
    program.set_weight("w", np.ones((2, 3), np.float32))
    program.finish_weights()
    kept, places = [], []
    for step in range(6):
        [y] = program.run("model", {"x": np.full((2, 3), float(step), np.float32)}, SIZES)
        if step % 2:
            kept.append((step, torch.from_numpy(y)[1:] if step > 3 else y[1:]))  # only a part is kept
        places.append(y.ctypes.data)
        del y
    assert [float(part[0, 0]) for _, part in kept] == [3.0 * step for step, _ in kept]
    assert places[0::2] == places[1::2] and len(set(places)) == len(kept)


def test_bfloat16_enters_and_leaves_as_bits():
    program = OpenVINOCompiler().program([product("bfloat16")])
    x, weight = torch.tensor([[1.5, -2.0, 3.0], [0.5, 0.25, 8.0]]), torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 2.0]])
    program.set_weight("w", bits(weight))
    program.finish_weights()
    [y] = program.run("model", {"x": bits(x)}, SIZES)
    found = program.to_host(y)
    assert found.dtype == np.uint16 and found.tolist() == bits(x @ weight.T).tolist()


def test_one_model_runs_with_every_number_of_tokens():
    program = OpenVINOCompiler().program([product()])
    weight = np.ones((2, 3), np.float32)
    program.set_weight("w", weight)
    program.finish_weights()
    for tokens in (1, 7, 300):
        x = np.full((tokens, 3), 2.0, np.float32)
        [y] = program.run("model", {"x": x}, StepSizes(tokens, 1, 1, 1, tokens, tokens))
        assert program.to_host(y).tolist() == [[6.0, 6.0]] * tokens


@pytest.mark.parametrize(("variable", "threads"), [("1", 1), ("3,2", 3), ("", None), ("many", None)])
def test_the_number_of_threads_is_that_of_the_environment(monkeypatch, variable, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert settings({"float32"}).get("INFERENCE_NUM_THREADS") == threads


def test_a_graph_with_an_unknown_operation_is_refused_by_name():
    graph = StepGraph("model", (), (Node("ssd", (), ()),), ())
    with pytest.raises(PlatformError, match="does not translate the operation 'ssd'"):
        OpenVINOCompiler().program([graph])


def test_too_large_caches_raise_memory_error_and_leave_none():
    from platforms.openvino.tests.test_attention import BLOCK, NUM_BLOCKS, STEPS, Layer

    layer = Layer()
    with pytest.raises(MemoryError, match="do not fit into the host's memory"):
        layer.program.allocate_caches(1 << 40, BLOCK)
    with pytest.raises(KeyError):
        layer.program.kv_bytes(layer.cache)
    layer.program.allocate_caches(NUM_BLOCKS, BLOCK)
    [found], wanted, _ = layer.step(*STEPS[0])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert (
        layer.program.kv_bytes(layer.cache) == NUM_BLOCKS * BLOCK * layer.program.kv_layout(layer.cache).bytes_per_token
    )
