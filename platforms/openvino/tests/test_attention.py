"""Paged attention against a plain definition in NumPy: prompts, chunks, decode steps and mixtures of them."""

from __future__ import annotations

import pytest

pytest.importorskip("openvino", reason="openvino is not installed: python3 ci/matrix.py run openvino installs it")

import numpy as np

from mvllm.plugin_api import AttentionSpec
from mvllm_graph import CacheValue, Node, StepGraph, StepSizes, Value
from mvllm_openvino.compiler import OpenVINOCompiler

BLOCK, NUM_BLOCKS, PAGES = 32, 40, 8
STEPS = (
    ((0, 0), (5, 40)),
    ((5, 40), (1, 1)),
    ((6, 41, 0), (1, 7, 33)),
    ((7, 48, 33), (1, 1, 1)),
    ((8, 49, 34), (30, 1, 50)),
)
"""Lengths before each step, and new tokens, of each request."""

SPECS = {
    "plain": {},
    "multi-head": {"num_kv_heads": 4},
    "window": {"sliding_window": 7},
    "sinks": {"sinks": True},
    "values of another size": {"value_head_size": 16},
    "values in keys": {"num_kv_heads": 1, "head_size": 40, "value_head_size": 32, "values_in_keys": True},
    "soft cap": {"soft_cap": 2.0},
    "soft cap, window and sinks": {"soft_cap": 2.0, "sliding_window": 7, "sinks": True},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "bfloat16 and soft cap": {"dtype": "bfloat16", "kv_dtype": "bfloat16", "soft_cap": 2.0},
}
STEP_INPUTS = (
    Value("block_table", "step", ("R", "P"), "int32"),
    Value("slot_mapping", "step", ("T",), "int32"),
    Value("query_start_loc", "step", ("R+1",), "int32"),
    Value("seq_lens", "step", ("R",), "int32"),
)


class Layer:
    """One layer of attention through OpenVINO, and its definition. `num_readers` nodes more only read its cache."""

    def __init__(self, num_readers=0, **fields):
        defaults = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32", "kv_dtype": "float32"}
        self.spec = spec = AttentionSpec(**{**defaults, "scale": 0.2, **fields})
        self.rng = np.random.default_rng(0)
        self.sinks = self.rng.standard_normal(spec.num_heads).astype(np.float32) if spec.sinks else None
        self.cache = CacheValue("cache.0", "cache", (), spec.kv_dtype, spec, 0)
        values = None if spec.values_in_keys else "value"
        inputs = [
            Value("query", "step", ("T", spec.num_heads, spec.head_size), "float32"),
            Value("key", "step", ("T", spec.num_kv_heads, spec.head_size), "float32"),
            *([Value("value", "step", ("T", spec.num_kv_heads, spec.value_size), "float32")] if values else []),
            *([Value("sinks", "weight", (spec.num_heads,), "float32")] if spec.sinks else []),
            self.cache,
            *STEP_INPUTS,
        ]
        rest = ("sinks" if spec.sinks else None, "cache.0", *(value.name for value in STEP_INPUTS))
        size = ("T", spec.num_heads * spec.value_size)
        written = [("query", "key", values, *rest), *[("query", None, None, *rest)] * num_readers]
        nodes = tuple(
            Node("paged_attention", names, (Value(f"out{i}", "result", size, "float32"),))
            for i, names in enumerate(written)
        )
        graph = StepGraph("model", tuple(inputs), nodes, tuple(f"out{i}" for i in range(len(nodes))))
        self.program = OpenVINOCompiler().program([graph])
        if self.sinks is not None:
            self.program.set_weight("sinks", self.sinks)
        self.program.finish_weights()
        self.program.allocate_caches(NUM_BLOCKS, BLOCK)
        self.program.fill(self.cache, float("nan"))
        shape = (NUM_BLOCKS * BLOCK, spec.num_kv_heads)
        self.keys = np.zeros((*shape, spec.head_size), np.float32)
        self.values = np.zeros((*shape, spec.value_size), np.float32)
        self.table = self.rng.permutation(NUM_BLOCKS).astype(np.int32).reshape(-1, PAGES)

    def step(self, past, new, padding=0):
        """Results of OpenVINO for each node, and the expected ones, of one step with random arrays."""
        spec, num_tokens = self.spec, sum(new)
        starts = np.cumsum([0, *new])
        made = {
            name: self.rng.standard_normal((num_tokens, heads, size)).astype(np.float32)
            for name, heads, size in (
                ("query", spec.num_heads, spec.head_size),
                ("key", spec.num_kv_heads, spec.head_size),
                ("value", spec.num_kv_heads, spec.value_size),
            )
        }
        if spec.values_in_keys:
            made["value"] = made["key"][..., : spec.value_size]
        slots = [self.slots(r, np.arange(past[r], past[r] + n)) for r, n in enumerate(new)]
        slots = np.concatenate([np.zeros(0, np.int32), *slots])
        self.keys[slots], self.values[slots] = made["key"], made["value"]
        given = {name: np.pad(array, ((0, padding), (0, 0), (0, 0))) for name, array in made.items()}
        given["block_table"] = np.pad(self.table[: len(new)], ((0, padding), (0, 0)))
        given["slot_mapping"] = np.pad(slots, (0, padding), constant_values=-1).astype(np.int32)
        given["query_start_loc"] = np.pad(starts, (0, padding), mode="edge").astype(np.int32)
        given["seq_lens"] = np.pad(np.add(past, new), (0, padding)).astype(np.int32)
        requests, longest = len(new) + padding, int(given["seq_lens"].max())
        sizes = StepSizes(num_tokens + padding, requests, PAGES, 1, max(new, default=0), longest)
        found = [self.program.to_host(array) for array in self.program.run("model", given, sizes)]
        rows = [(r, i) for r, n in enumerate(new) for i in range(n)]
        wanted = [self.attend(r, past[r] + i, made["query"][starts[r] + i]) for r, i in rows]
        return found, np.array(wanted).reshape(num_tokens, -1) if wanted else None, slots

    def slots(self, request, positions):
        return self.table[request][positions // BLOCK] * BLOCK + positions % BLOCK

    def attend(self, request, position, query):
        spec = self.spec
        first = 0 if spec.sliding_window is None else max(0, position + 1 - spec.sliding_window)
        slots = self.slots(request, np.arange(first, position + 1))
        group = spec.num_heads // spec.num_kv_heads
        results = []
        for head in range(spec.num_heads):
            scores = self.keys[slots, head // group] @ query[head] * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
            extra = [] if self.sinks is None else [self.sinks[head]]
            weights = np.exp(np.append(scores, extra))
            results.append(weights[: len(slots)] / weights.sum() @ self.values[slots, head // group])
        return np.concatenate(results)


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_attends_to_what_it_stored_in_every_step(name):
    layer = Layer(**SPECS[name])
    tolerance = 0.05 if layer.spec.dtype == "bfloat16" else 1e-5
    for past, new in STEPS:
        for padding in (0, 3):
            [found], wanted, slots = layer.step(past, new, padding)
            assert found.shape == (len(wanted) + padding, wanted.shape[1]) and np.isfinite(found).all()
            np.testing.assert_allclose(found[: len(wanted)], wanted, atol=tolerance)
    if layer.spec.dtype == "float32":
        keys, *values = layer.program.read_slots(layer.cache, slots)
        assert (keys == layer.keys[slots]).all()
        assert len(values) == (0 if layer.spec.values_in_keys else 1)
        assert all((part == layer.values[slots]).all() for part in values)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_step_of_padding_alone_gives_zeros_and_stores_nothing(soft_cap):
    layer = Layer(soft_cap=soft_cap)
    layer.program.fill(layer.cache, 0.5)
    [found], _, _ = layer.step((), (), padding=3)
    assert found.shape == (3, layer.spec.num_heads * layer.spec.value_size) and not found.any()
    for part in layer.program.read_slots(layer.cache, np.arange(NUM_BLOCKS * BLOCK)):
        assert (part == 0.5).all()


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 9, "sinks": True}, {"soft_cap": 2.0}])
def test_a_layer_without_keys_reads_what_another_one_stored_in_the_same_step(fields):
    layer = Layer(num_readers=2, **fields)
    for past, new in STEPS:
        found, wanted, _ = layer.step(past, new)
        for result in found:
            np.testing.assert_allclose(result, wanted, atol=1e-5)


def test_another_dtype_of_the_cache_is_refused_with_the_reason():
    spec = AttentionSpec(4, 2, 32, "float32", "bfloat16", 0.2)
    graph = StepGraph("model", (CacheValue("cache.0", "cache", (), "bfloat16", spec, 0),), (), ())
    assert OpenVINOCompiler().unsupported(graph) == ["the KV cache has the compute dtype, float32, not bfloat16"]
