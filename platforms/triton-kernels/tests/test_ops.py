"""The kernels that implement core's operations: core's cases against exact results, and their additional guarantees."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.testing import op_cases
from mvllm.testing.state_cases import compared, state_dtypes

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import activation, norm, rotary_embedding, state  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.argmax import argmax  # noqa: E402

DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive))

FUNCTIONS = {
    "rms_norm": norm.rms_norm,
    "fused_add_rms_norm": norm.fused_add_rms_norm,
    "rotary_embedding": rotary_embedding.rotary_embedding,
    "silu_and_mul": activation.silu_and_mul,
    "gelu_and_mul": activation.gelu_and_mul,
    "gelu_tanh_and_mul": activation.gelu_tanh_and_mul,
    "argmax": argmax,
    "gated_rms_norm": state.gated_rms_norm,
}
WITH_STATE = {
    "causal_conv1d": state.causal_conv1d,
    "ssd": state.ssd,
    "gated_delta_rule": state.gated_delta_rule,
    "kda": state.kda,
}


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", FUNCTIONS)
def test_every_case_of_core(op, dtype):
    for trial in op_cases.op_calls(op, dtype):
        exact, found = as_tuple(op_cases.exact(trial)), as_tuple(FUNCTIONS[op](*trial.make()))
        assert len(exact) == len(found)
        for wanted, got in zip(exact, found):
            assert got.shape == wanted.shape, trial
            if got.is_floating_point():
                assert got.dtype == getattr(torch, dtype)
                allowed = op_cases.tolerance(dtype) * wanted.abs().max()
                assert (got.double() - wanted).abs().max() <= allowed, trial
            else:
                assert got.dtype == wanted.dtype and torch.equal(got, wanted), trial


@pytest.mark.parametrize("op", WITH_STATE)
@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [
        ("bfloat16", (0, 1, 3, 4)),  # each kind of step and each size; the interpreter takes milliseconds per token
        *(pytest.param(dtype, range(8), marks=pytest.mark.exhaustive) for dtype in ("float32", "bfloat16", "float16")),
    ],
)
def test_states_of_core_s_cases(op, dtype, chosen):
    trials = list(op_cases.op_calls(op, dtype))
    for trial in (trials[i] for i in chosen):
        arguments = trial.make()
        found = compared(trial, [WITH_STATE[op](*arguments)], arguments)
        for wanted, got in zip(op_cases.exact(trial), found, strict=True):
            assert got.dtype in (getattr(torch, dtype), torch.int64, *state_dtypes(trial))
            assert (got.double() - wanted).abs().max() <= op_cases.tolerance(dtype) * wanted.abs().max(), trial


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "fused_add_rms_norm"])
def test_results_are_rounded_like_the_reference(op):
    trial = list(op_cases.op_calls(op, "bfloat16"))[-1]
    for wanted, got in zip(as_tuple(SCHEMAS[op].reference(*trial.make())), as_tuple(FUNCTIONS[op](*trial.make()))):
        neighbours = (wanted.view(torch.int16).int() - got.view(torch.int16).int()).abs()
        assert neighbours.max() <= 1  # the order of a sum may change a rounding
        assert (neighbours > 0).float().mean() < 0.02


def test_add_rms_norm_works_in_place():
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    normed, total = norm.fused_add_rms_norm(x, residual, torch.ones(64), 1e-5)
    assert normed.data_ptr() == x.data_ptr() and total.data_ptr() == residual.data_ptr()


def test_rotary_leaves_other_elements_unchanged():
    fused = torch.randn(2, 4 * 32)
    before, query, key = fused.clone(), fused[:, :64].view(2, 2, 32), fused[:, 64:96].view(2, 1, 32)
    angles = torch.rand(5, 8)
    rotary_embedding.rotary_embedding(torch.tensor([4, 1]), query, key, torch.cat((angles.cos(), angles.sin()), dim=1))
    assert torch.equal(fused[:, 96:], before[:, 96:])
    assert torch.equal(fused.view(2, 4, 32)[..., 16:], before.view(2, 4, 32)[..., 16:])
    assert not torch.equal(fused[:, :16], before[:, :16])


@pytest.mark.parametrize("size", [7, 3000])
def test_argmax_takes_the_first_of_equal_elements(size):
    x = torch.zeros(3, size)
    x[1, 2], x[1, 5], x[1, size - 1] = 1.0, 1.0, 1.0
    x[2] = -3.0
    x[2, 4] = -0.0
    x[2, 6] = 0.0
    values, places = argmax(x)
    assert values.tolist() == [0.0, 1.0, 0.0]
    assert places.tolist() == [0, 2, 4]


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_argmax_treats_nan_as_the_largest(nan):
    x = torch.full((1, 40), torch.inf)
    x[0, 17] = nan
    values, places = argmax(x)
    assert values.isnan().all() and places.tolist() == [17]


def test_argmax_of_infinities():
    values, places = argmax(torch.full((1, 9), -torch.inf))
    assert values.tolist() == [-torch.inf] and places.tolist() == [0]


def test_inputs_without_rows():
    assert norm.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert activation.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    assert argmax(torch.empty(0, 8))[1].shape == (0,)
