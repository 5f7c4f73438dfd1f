"""Int8 and int4 weights: core's cases against exact results, and rejected arguments."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import quantized_linear as quantized  # noqa: E402  once Triton is imported with its interpreter


def check_against_exact(trials, dtype):
    tried = 0
    for trial in trials:
        x, weight, bias = trial.make()
        exact = op_cases.exact(trial)
        found = quantized.quantized_linear(x, quantized.pack(weight), bias)
        assert found.dtype == x.dtype and found.shape == exact.shape
        # The result includes one rounding of x and one of the weight's scale.
        assert (found.double() - exact).abs().max() <= op_cases.tolerance(dtype) * exact.abs().max(), trial
        tried += 1
    assert tried


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_cases_of_core(dtype):
    check_against_exact(
        [t for t in op_cases.op_calls("quantized_linear", dtype) if t.facts["in_features"] == 80], dtype
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_case_of_core(dtype):
    check_against_exact(op_cases.op_calls("quantized_linear", dtype), dtype)


def test_four_bits_take_half_the_memory_of_eight():
    trials = list(op_cases.op_calls("quantized_linear", "float32"))
    sizes = {}
    for trial in trials:
        if trial.facts["in_features"] == 384:
            sizes[trial.facts["bits"]] = quantized.pack(trial.make()[1]).data.nbytes
    assert sizes[4] * 2 == sizes[8] == 384 * 320


def test_leading_dimensions_and_strided_rows():
    trial = next(iter(op_cases.op_calls("quantized_linear", "float32")))
    _, weight, bias = trial.make()
    packed = quantized.pack(weight)
    x = torch.randn(2, 3, 2 * packed.in_features)[..., : packed.in_features]
    found = quantized.quantized_linear(x, packed, bias)
    assert found.shape == (2, 3, packed.out_features)
    torch.testing.assert_close(found[1, 2], quantized.quantized_linear(x[1, 2:], packed, bias)[0])


def test_unsupported_groups_and_bits_are_rejected():
    assert "not 24" in quantized.refusals(96, 24, 8)[0]
    assert "not 3" in quantized.refusals(96, 32, 3)[0]
    assert quantized.refusals(96, 96, 8) == quantized.refusals(4096, 128, 4) == []
