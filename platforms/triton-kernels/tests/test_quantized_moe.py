"""Experts with packed weights: core's cases against exact results, splits, and memory."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.testing import op_cases
from mvllm.testing.quantized_moe_cases import with_unrounded_inputs

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import quantized_moe  # noqa: E402  once Triton is imported with its interpreter

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_of_core(kind, dtype):
    tried = 0
    for trial in trials(kind, dtype):
        check(trial, dtype, native=False)
        tried += 1
    assert tried
