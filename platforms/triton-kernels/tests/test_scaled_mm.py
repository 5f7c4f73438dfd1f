"""Products of 8-bit floats by torch's library, which computes on the host, too."""

from __future__ import annotations

import importlib

import pytest
import torch

from mvllm.ops.float8_linear import Float8Weight
from mvllm.testing import op_cases

importlib.import_module("platforms.triton-kernels.tests.interpreted")

from mvllm_triton import float8_weight, scaled_mm  # noqa: E402  once Triton is imported with its interpreter
from mvllm_triton.float8_weight import float8_product, pack  # noqa: E402

ALL = frozenset((dtype, bias) for dtype in scaled_mm.DTYPES for bias in (False, True))


@pytest.fixture
def calls(monkeypatch):
    """Scales of each call of the library."""
    made = []

    def record(codes, scale, weight, weight_scale, bias, dtype):
        made.append((tuple(scale.shape), tuple(weight_scale.shape)))
        return multiply(codes, scale, weight, weight_scale, bias, dtype)

    multiply = scaled_mm.multiply
    scaled_mm._works.cache_clear()
    monkeypatch.setattr(scaled_mm, "multiply", record)
    yield made
    scaled_mm._works.cache_clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_case_with_rounded_inputs_and_without_blocks_is_exact(dtype, calls):
    kinds = set()
    for trial in op_cases.op_calls("float8_linear", dtype):
        facts = trial.facts
        whole = facts["block_columns"] >= facts["in_features"]
        if facts["inputs"] == "floats" or not whole or facts["out_features"] % 16 or facts["in_features"] > 80:
            continue
        x, weight, bias = trial.make()
        packed = pack(weight)
        assert packed.library == ALL
        calls.clear()
        found, exact = float8_product(x, packed, bias), op_cases.exact(trial)
        assert len(calls) == 1
        kinds.add(calls[0][0][1:])
        assert found.dtype == x.dtype and found.shape == exact.shape
        assert (found.double() - exact).abs().max() <= op_cases.tolerance(dtype) * exact.abs().max(), trial
    assert kinds == {(), (1,)}  # one scale for all rows, and one for each


def _weight(out_features=32, in_features=64, inputs="dynamic", block_columns=64):
    codes = torch.randn(out_features, in_features).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Weight(
        codes, torch.full((1, -(-in_features // block_columns)), 0.5), out_features, block_columns, inputs
    )


def test_the_kernel_multiplies_what_the_library_does_not():
    assert pack(_weight()).library == ALL
    assert pack(_weight(), native=False).library == frozenset()
    assert pack(_weight(out_features=24)).library == frozenset()
    assert pack(_weight(in_features=40, block_columns=40)).library == frozenset()
    assert pack(_weight(inputs="floats")).library == frozenset()
    assert pack(_weight(block_columns=32)).library == frozenset()


@pytest.mark.parametrize("fails", [lambda found: found * 1.1, lambda found: 1 / 0 if found is None else _raise()])
def test_a_library_that_is_wrong_or_raises_is_not_used(fails, calls, monkeypatch):
    multiply = scaled_mm.multiply
    monkeypatch.setattr(scaled_mm, "multiply", lambda *args: fails(multiply(*args)))
    packed = pack(_weight())
    assert packed.library == frozenset()
    calls.clear()
    x = torch.randn(3, 64).bfloat16()
    expected = float8_weight.float8_linear(x, packed.weight, packed.scale)
    assert torch.equal(float8_product(x, packed, None), expected) and not calls


def _raise():
    raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")


def test_results_equal_those_of_the_kernel_and_keep_leading_dimensions():
    packed = pack(_weight())
    x = torch.randn(2, 3, 128).bfloat16()[..., :64]
    found = float8_product(x, packed, None)
    assert found.shape == (2, 3, 32)
    torch.testing.assert_close(found, float8_weight.float8_linear(x, packed.weight, packed.scale), rtol=0.01, atol=0.01)
    assert float8_product(x[:0], packed, None).shape == (0, 3, 32)


def test_a_nan_affects_only_its_own_row():
    packed, x = pack(_weight()), torch.randn(3, 64).bfloat16()
    expected = float8_product(x, packed, None)
    x[1, 5] = torch.nan
    found = float8_product(x, packed, None)
    assert found[1].isnan().all() and torch.equal(found[::2], expected[::2])
