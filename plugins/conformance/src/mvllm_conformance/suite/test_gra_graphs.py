"""GRA: programs of a graph compiler compute what the definitions of a graph's operations give.

Tests import mvllm-graph when they run: only platforms with a graph compiler require it.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mvllm.extension_api.testing import torch_dtype
from mvllm.plugin_api import DeviceRuntime, GraphCompiler, MultiModalModel, Node, StepGraph, Value
from mvllm_conformance.markers import clause, exhaustive, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.tensor_assertions import assert_equal
from mvllm_conformance.zoo import FAMILIES, STATE_FAMILY, VOCAB_SIZE, Zoo, main_dtype

if TYPE_CHECKING:
    from mvllm_conformance.graph_models import GraphModelUnderTest

LENGTHS = (37, 20, 5)
TOLERANCE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.4}
"""Largest difference of a logit from the definitions', whose standard deviation is about 1."""


def compiler_of(subject: PlatformUnderTest) -> GraphCompiler:
    compiler = subject.platform.graph_compiler()
    assert isinstance(compiler, GraphCompiler), "graph_compiler is claimed, so the method must return a GraphCompiler"
    return compiler


def interpreter() -> GraphCompiler:
    from mvllm_graph import Interpreter

    return Interpreter()


def model_of(subject: PlatformUnderTest, zoo: Zoo, family: str = "llama", order: int = 1) -> GraphModelUnderTest:
    from mvllm_conformance.graph_models import GraphModelUnderTest, trace_checkpoint

    if family == STATE_FAMILY and not subject.capabilities.state:
        skip_not_claimed("state")
    compiler, rng = compiler_of(subject), random.Random(family)
    traced = trace_checkpoint(zoo.checkpoint(family), main_dtype(subject.capabilities), list(compiler.operations()))
    token_ids = [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return GraphModelUnderTest(traced, compiler, token_ids, order=order)


def assert_close(subject: PlatformUnderTest, found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    allowed, off = TOLERANCE[main_dtype(subject.capabilities)], float((found - wanted).abs().max())
    assert off < allowed, f"{where}: logits are off by {off:.2g}, more than {allowed}"


STEPS = ((20, 0, 5), (16, 19, 0), (1, 1, 0))
"""New tokens of each request: prompts whole and in parts, and single tokens."""


@clause("GRA-01")
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(f, marks=() if f in ("llama", "mistral-window") else exhaustive) for f in FAMILIES),
        STATE_FAMILY,
    ],
)
def test_a_program_gives_the_logits_of_the_definitions(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo, family: str
) -> None:
    model = model_of(subject, zoo, family)
    exact = replace(model, compiler=interpreter())
    for lengths in STEPS:
        where = f"{family}, step of {lengths} tokens"
        assert_close(subject, model.step(lengths), exact.step(lengths), where)
    model.program.close()


@clause("GRA-01")
@pytest.mark.parametrize("family", ["llama", STATE_FAMILY])
def test_padding_changes_nothing(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo, family: str
) -> None:
    model = model_of(subject, zoo, family)
    exact = replace(model, compiler=interpreter())
    for padding, lengths in zip((3, 1, 2), STEPS, strict=True):
        where = f"{family}, step of {lengths} tokens and {padding} of padding"
        assert_close(subject, model.step(lengths, padding=padding), exact.step(lengths), where)
    model.program.close()


@clause("GRA-02")
def test_weights_are_taken_in_any_order_and_may_be_set_again(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo
) -> None:
    from mvllm_graph.testing import to_numpy

    model = model_of(subject, zoo, order=-1)
    exact = replace(model, compiler=interpreter(), order=1)
    assert_close(subject, model.step((20, 0, 0)), exact.step((20, 0, 0)), "weights in reversed order")
    name = next(value.name for value in model.traced.graphs[0].inputs_of("weight") if len(value.shape) == 1)
    doubled = to_numpy(2 * model.traced.arrays[name])
    for each in (model, exact):
        each.program.set_weight(name, doubled)
        each.restart()
    assert_close(subject, model.step((20, 0, 0)), exact.step((20, 0, 0)), f"after {name} was set again")
    model.program.close()


@clause("GRA-03")
def test_a_run_changes_no_input_and_no_earlier_result(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo
) -> None:
    model = model_of(subject, zoo)
    arrays, sizes = model.step_inputs((20, 20, 0), 0)
    before = {name: array.copy() for name, array in arrays.items()}
    first = model.run(arrays, sizes)
    kept = first.clone()
    model.run(*model.step_inputs((1, 0, 5), 0))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name], f"run changed {name}")
    assert_equal(first, kept, "a later run changed the result of an earlier one on the host")
    model.program.close()


@clause("GRA-04")
@pytest.mark.parametrize("family", ["llama", STATE_FAMILY])
def test_caches_are_allocated_again_and_a_program_is_closed_twice(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo, family: str
) -> None:
    model = model_of(subject, zoo, family)
    before = model.step((20, 3, 5))
    model.program.free_caches()
    model.program.free_caches()
    model.allocate(model.program, spare_blocks=7)
    model.restart()
    assert_equal(model.step((20, 3, 5)), before, "after caches were freed and allocated again")
    model.program.close()
    model.program.close()


@clause("GRA-05")
def test_a_compiler_names_operations_and_refuses_others(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    from mvllm_graph import GRAPH_OPERATIONS

    compiler = compiler_of(subject)
    names = set(compiler.operations())
    assert names and names <= set(GRAPH_OPERATIONS), f"unknown operations: {sorted(names - set(GRAPH_OPERATIONS))}"
    x, y = Value("x", "step", ("T", 4), "float32"), Value("y", "result", ("T", 4), "float32")
    graph = StepGraph("model", (x,), (Node("an_operation_of_tomorrow", ("x",), (y,)),), ("y",))
    reasons = compiler.unsupported(graph)
    assert reasons and all(isinstance(reason, str) and reason.strip() for reason in reasons), reasons


@clause("GRA-06")
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=exhaustive) for f in FAMILIES if f != "llama")])
def test_parts_between_collectives_give_the_logits_of_the_whole(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo, family: str
) -> None:
    from mvllm_conformance.graph_models import GraphModelUnderTest, step_of_ranks, trace_checkpoint
    from mvllm_graph.testing import COLLECTIVES

    whole = replace(model_of(subject, zoo, family), compiler=interpreter())
    compiler, dtype = compiler_of(subject), main_dtype(subject.capabilities)
    operations = [name for name in compiler.operations() if name not in COLLECTIVES]
    ranks = []
    for rank in range(2):
        traced = trace_checkpoint(zoo.checkpoint(family), dtype, operations, rank=rank, world_size=2)
        ranks.append(GraphModelUnderTest(traced, compiler, whole.token_ids))
    assert len(ranks[0].traced.graphs) > 2, "the model has collectives"
    for padding, lengths in zip((0, 3, 1), STEPS, strict=True):
        exact = whole.step(lengths)
        for rank, logits in enumerate(step_of_ranks(ranks, lengths, padding)):
            assert_close(subject, logits, exact, f"{family}, rank {rank} of 2, step of {lengths} tokens")
    for each in ranks:
        each.program.close()


@clause("GRA-07")
def test_tokens_take_rows_of_items_and_three_rotary_positions(
    subject: PlatformUnderTest, bound_device: DeviceRuntime, zoo: Zoo
) -> None:
    from mvllm_conformance.graph_models import GraphModelUnderTest, ItemUnderTest, trace_checkpoint
    from mvllm_graph.testing import to_numpy

    compiler, dtype, folder = compiler_of(subject), main_dtype(subject.capabilities), zoo.checkpoint("llama")
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, frequencies = hf["hidden_size"], hf["hidden_size"] // hf["num_attention_heads"] // 2
    third = frequencies // 3
    taken = MultiModalModel(embedding_width=2 * hidden, rope_sections=(frequencies - 2 * third, third, third))
    traced = trace_checkpoint(folder, dtype, list(compiler.operations()), multimodal=taken)
    random_rows = torch.randn((14, 2 * hidden), generator=torch.Generator().manual_seed(7))
    # The item begins in the first step and ends in the second one; the third one has none.
    item = ItemUnderTest(to_numpy(random_rows.to(torch_dtype(dtype))), request=0, start=10)
    rng = random.Random("items")
    token_ids = [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    for padding in (0, 2):
        model = GraphModelUnderTest(traced, compiler, token_ids, item=item)
        exact = replace(model, compiler=interpreter())
        for lengths in STEPS:
            where = f"an item in a step of {lengths} tokens and {padding} of padding"
            assert_close(subject, model.step(lengths, padding=padding), exact.step(lengths), where)
        model.program.close()
