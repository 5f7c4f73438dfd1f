"""Experts with packed weights: core's cases against exact results, splits, and memory."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.testing import op_cases
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm.testing.op_call import OpCall, random_tensor
from mvllm.testing.quantized_moe_cases import with_unrounded_inputs
from mvllm.testing.quantized_weight_cases import float8_weight, quantized_weight

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import quantized_moe  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.tiles import InnerSplits  # noqa: E402

KINDS = ("mxfp4", "float8_linear", "quantized_linear")


def trials(kind, dtype, rows=(1, 3, 17)):
    for trial in op_cases.op_calls("quantized_moe", dtype):
        facts = trial.facts
        formats = dict(facts["gate_up"]).get("formats", ())
        name = "mxfp4" if set(formats) == {"mxfp4"} else facts["linear"]
        if name == kind and len(trial.make()[0]) in rows:
            yield trial


def run(trial, **options):
    x, gate_up, gate_up_bias, down, *rest = trial.make()
    up, out = quantized_moe.pack((gate_up, down), **options)
    return quantized_moe.quantized_moe(x, up, gate_up_bias, out, *rest)


def check(trial, dtype, **options):
    found, exact = run(trial, **options), op_cases.exact(with_unrounded_inputs(trial))
    assert found.dtype == getattr(torch, dtype) and found.shape == exact.shape
    off = (found.double() - exact).abs().max() / exact.abs().max()
    assert off <= op_cases.tolerance(dtype, trial), f"{trial}: off by {off:.2g}"


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_exact(kind):
    for trial in trials(kind, "float32", rows=(3,)):
        check(trial, "float32", native=False)


def weights_of(kind, out_features, in_features):
    """Weights of two experts."""
    facts = {"in_features": in_features, "out_features": out_features}
    if kind == "mxfp4":
        return tuple(block_quantized_weight((("mxfp4", out_features),), in_features, False, seed=e) for e in range(2))
    if kind == "float8_linear":
        facts |= {"block_rows": 32, "block_columns": 64, "inputs": "floats"}
        return tuple(float8_weight(facts, e) for e in range(2))
    facts |= {"bits": 4, "group_size": 64, "symmetric": False, "int8_activations": False}
    return tuple(quantized_weight(facts, out_features, e) for e in range(2))


@pytest.mark.parametrize("kind", KINDS)
def test_split_results_are_exact_and_repeatable(kind, monkeypatch):
    counts = []

    def two_splits(num_programs, in_features, inner, processors, **options):
        iterations = -(-in_features // inner)
        counts.append(iterations)
        return InnerSplits(2, -(-iterations // 2) * inner)

    monkeypatch.setattr(quantized_moe, "inner_splits", two_splits)
    hidden, size = 192, 160
    biases = random_tensor(torch.float32, 2, 2 * size, seed=4), random_tensor(torch.float32, 2, hidden, seed=5)
    given = weights_of(kind, 2 * size, hidden), biases[0], weights_of(kind, hidden, size), biases[1]
    ids, shares = torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    arguments = random_tensor(torch.float32, 2, hidden), *given, ids, shares, 1.702, 1.5
    facts = {"linear": "quantized_linear", "down": (("int8_activations", False),)}
    trial = OpCall("quantized_moe", facts, lambda: arguments)
    check(trial, "float32", native=False)
    assert torch.equal(run(trial, native=False), run(trial, native=False))
    assert counts[:2] == {"mxfp4": [2, 2]}.get(kind, [3, 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_of_core(kind, dtype, native):
    tried = 0
    for trial in trials(kind, dtype):
        check(trial, dtype, native=native)
        tried += 1
    assert tried
