"""The graphs of every family give the logits of the model, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from plugins.graph.tests.graph_driver import GraphDriver, trace_checkpoint

from mvllm.errors import ConfigError
from mvllm.platform.step_graph import StepGraph
from mvllm_graph import Interpreter
from mvllm_graph.operations import GRAPH_OPERATIONS
from tests.helpers.model_zoo import VOCAB_SIZE, ZOO, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model

FolderOf = Callable[[str], Path]
CHUNKED = {"llama4", "llama4-interleaved", "llama4-two"}
SPARSE = {name for name in ZOO if name.partition("-")[0] in ("dsa", "glm5")}
"""Models with sparse attention, which platforms with graphs do not claim."""

IN_EVERY_RUN = ("llama-gqa", "gemma2", "granitehybrid")
MEMBERS = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_EVERY_RUN))
    for name in sorted(ZOO.keys() - CHUNKED - SPARSE)
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Makes a checkpoint of the zoo when it is first asked for."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp("zoo") / name, tokenizer=False))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_steps(driver: PagedDriver) -> list[torch.Tensor]:
    """Logits of a whole prompt, of another in chunks beside it, and of tokens after both."""
    first, second = driver.add(20), driver.add(33)
    results = driver.step([(first, tokens(20, 1)), (second, tokens(17, 2))])
    results += driver.step([(first, tokens(1, 3)), (second, tokens(16, 4))])
    for i in range(2):
        results += driver.step([(first, tokens(1, 5 + i)), (second, tokens(1, 9 + i))])
    return results


@pytest.mark.parametrize("name", MEMBERS)
def test_graphs_give_the_logits_of_the_model(name: str, folder_of: FolderOf) -> None:
    compiler, folder = Interpreter(), folder_of(name)
    traced = trace_checkpoint(folder, compiler)
    driver = GraphDriver(traced, compiler)
    with torch.inference_mode():
        expected = run_steps(PagedDriver(load_model(folder)))
    for ours, wanted in zip(run_steps(driver), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
    read = {value.name for graph in traced.graphs for value in graph.inputs_of("weight", "constant")}
    assert sorted(driver.given) == sorted(read), "each array once"
    for graph in traced.graphs:
        assert {node.op for node in graph.nodes} <= set(GRAPH_OPERATIONS)
        assert StepGraph.from_bytes(graph.to_bytes()) == graph


@pytest.mark.parametrize("name", ["llama-gqa", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_operations_that_a_compiler_lacks_are_their_definitions(name: str, folder_of: FolderOf) -> None:
    missing = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_tanh_and_mul", "rotary_embedding", "linear")
    compiler, folder = Interpreter(without=missing), folder_of(name)
    traced = trace_checkpoint(folder, compiler)
    used = {node.op for graph in traced.graphs for node in graph.nodes}
    assert not used & set(missing)
    with torch.inference_mode():
        expected = run_steps(PagedDriver(load_model(folder)))
    for ours, wanted in zip(run_steps(GraphDriver(traced, compiler)), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_quantized_weights_are_the_arrays_of_their_fields(quantization: str, folder_of: FolderOf) -> None:
    compiler, folder = Interpreter(), folder_of("llama-gqa")
    traced = trace_checkpoint(folder, compiler, quantization=quantization)
    assert "layers.0.mlp.down.weight.values" in traced.arrays and "layers.0.mlp.down.weight.scales" in traced.arrays
    with torch.inference_mode():
        expected = run_steps(PagedDriver(load_model(folder, quantization=quantization)))
    for ours, wanted in zip(run_steps(GraphDriver(traced, compiler)), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_optional_operations_occur_if_the_compiler_names_them(folder_of: FolderOf) -> None:
    folder, fused = folder_of("llama-gqa"), "linear_silu_and_mul"
    for compiler, is_there in ((Interpreter(), False), (Interpreter(optional=[fused]), True)):
        ops = {node.op for node in trace_checkpoint(folder, compiler).graphs[0].nodes}
        assert (fused in ops) is is_there


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(CHUNKED))
def test_chunked_attention_is_refused(name: str, folder_of: FolderOf) -> None:
    with pytest.raises(ConfigError, match="chunked attention"):
        trace_checkpoint(folder_of(name), Interpreter())
