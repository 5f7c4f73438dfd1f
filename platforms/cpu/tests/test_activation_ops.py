"""Activations, layer norms, decays and products per head of the compiled kernels, against exact arithmetic."""

from __future__ import annotations

import pytest
import torch

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.testing.op_cases import exact, op_calls, tolerance
from mvllm_cpu import kernels
from mvllm_cpu.activation_ops import FUNCTIONS, MOST_TOKENS, ActivationOps
from mvllm_cpu.moe import Moe

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = (*FUNCTIONS, "gelu_and_mul", "layer_norm", "log_decay", "head_product")


@pytest.fixture(scope="module")
def ops():
    return {provider.op: provider.function for provider in ActivationOps(LOADED.library).providers()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_exact_arithmetic(ops, name, dtype):
    dtype_name = str(dtype).removeprefix("torch.")
    for case in op_calls(name, dtype_name):
        found, expected = ops[name](*case.make()), exact(case)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance(dtype_name, case), case


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_of_extreme_numbers(ops, name, dtype):
    """In rows longer than a vector and with a rest; large numbers, NaN, and infinities where they are no products."""
    is_product = name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu_squared")
    largest = 200.0 if is_product else torch.finfo(dtype).max / 2
    values = [0.0, -0.0, 1e-4, -1e-4, 20.0, -20.0, 90.0, -90.0, largest, -largest, float("nan")]
    values += [] if is_product else [torch.inf, -torch.inf]
    x = torch.tensor(values * 3).to(dtype)[None]
    expected = SCHEMAS[name].reference(x.double())
    found = ops[name](x).double()
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan() & (expected.abs() < torch.finfo(dtype).max)
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[numbers], expected[numbers], rtol=bound, atol=2e-7)


def test_layer_norms_of_shifted_rows(ops):
    """The variance is that of the differences from the mean, not a difference of large squares."""
    x = torch.randn(3, 101, generator=torch.Generator().manual_seed(1)) + 3000
    expected = SCHEMAS["layer_norm"].reference(x.double(), None, None, 1e-5)
    torch.testing.assert_close(ops["layer_norm"](x, None, None, 1e-5).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_sums_are_those_of_a_sum_and_a_norm(ops, dtype):
    for case in op_calls("fused_add_layer_norm", str(dtype).removeprefix("torch.")):
        x, residual, *rest = case.make()
        total = residual + x
        normed, stream = ops["fused_add_layer_norm"](x, residual, *rest)
        assert torch.equal(stream, total) and torch.equal(normed, ops["layer_norm"](total, *rest))


def test_decays_of_small_and_of_large_arguments(ops):
    x = torch.tensor([[-100.0, -30.0, -5.0, 0.0, 5.0, 19.0, 21.0, 100.0] * 3])
    factors, bias = torch.full((24,), -0.5), torch.zeros(24)
    expected = SCHEMAS["log_decay"].reference(x.double(), factors.double(), bias.double())
    torch.testing.assert_close(ops["log_decay"](x, factors, bias).double(), expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_of_a_product_per_head_does_not_depend_on_the_others(ops, dtype, is_transposed):
    shape = (3, 130, 72) if is_transposed else (3, 72, 130)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = weight.transpose(1, 2) if is_transposed else weight
    x = torch.randn(11, 3, 72, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = ops["head_product"](x, weight)
    assert torch.equal(whole, torch.cat([ops["head_product"](row, weight) for row in x.split(1)]))


def test_many_tokens_are_multiplied_by_torch(ops):
    weight, x = torch.randn(2, 8, 12), torch.randn(MOST_TOKENS + 1, 2, 8)
    torch.testing.assert_close(ops["head_product"](x, weight), torch.einsum("thk,hkn->thn", x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gelu_tanh_moe", "ungated_moe"])
def test_experts_with_other_gates_and_without(name, dtype):
    provider = next(p for p in Moe(LOADED.library).providers() if p.op == name)
    dtype_name = str(dtype).removeprefix("torch.")
    for case in op_calls(name, dtype_name):
        arguments = list(case.make())
        arguments[1:3] = provider.prepare((arguments[1], arguments[2]))
        found, expected = provider.function(*arguments), exact(case)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance(dtype_name, case), case
