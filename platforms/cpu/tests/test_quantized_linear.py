"""Compiled int8 and int4 products against the reference and float64, on every instruction set that runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm.layers.quantization.rtn_matrix import round_rows
from mvllm.ops.quantized_linear import quantized_linear as reference
from mvllm.plugin_api import OpCase, QuantizedWeight
from mvllm_cpu import kernels
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.quantized_linear import MOST_INT8_COLUMNS, QuantizedLinear

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Unit roundoff: the largest relative error of rounding a result."""
ROWS = (1, 2, 3, 5, 6, 7, 8, 12, 13, 33)
MANY_ROWS = (97, 193)
SHAPES = ((1, 1), (1, 64), (15, 30), (17, 33), (64, 192), (65, 193), (7, 1027), (200, 768))
GROUPS = ((70, 256, 32), (64, 320, 64), (33, 200, 128), (130, 776, 136), (40, 1024, 512), (5, 136, 8))
"""(rows, columns, group_size), for instance with a shorter last group, or groups that are summed in pieces."""


@pytest.fixture(scope="module")
def op() -> QuantizedLinear:
    return QuantizedLinear(LOADED.library)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(out_features, in_features, group_size=None, *, bits=8, symmetric=True, int8_activations=False):
    """A weight of random integers over the whole range, including the smallest and the largest."""
    generator = torch.Generator().manual_seed(out_features)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def integers(*shape):
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)

    group_size = group_size or in_features
    groups = -(-in_features // group_size)
    values = integers(out_features, in_features)
    values[0, 0], values[-1, -1] = low, high
    scales = torch.rand(out_features, groups, generator=generator) * 0.02 + 0.001
    zeros = None if symmetric else integers(out_features, groups)
    return QuantizedWeight(values, scales, zeros, group_size, bits, int8_activations)


def exact(x, weight, bias=None):
    """The exact result in float64, and the sum of magnitudes, with zero points as separate terms."""
    of = torch.arange(weight.values.shape[1]) // weight.group_size
    zeros = torch.zeros_like(weight.scales) if weight.zero_points is None else weight.zero_points.double()
    scales = weight.scales.double()[:, of]
    wide = (weight.values.double() - zeros.double()[:, of]) * scales
    size = (weight.values.double().abs() + zeros.double().abs()[:, of]) * scales
    expected = x.double() @ wide.T
    return expected if bias is None else expected + bias.double(), x.double().abs() @ size.T


def assert_rounds(found, x, weight, bias=None):
    """Fails if an error exceeds the rounding of the result and of float32 sums."""
    assert found.dtype == x.dtype
    expected, size = exact(x, weight, bias)
    assert found.shape == expected.shape
    error = (found.double() - expected).abs()
    sums = size * 2**-24 * (weight.shape[1] ** 0.5 + 4)
    allowed = expected.abs() * UNIT[x.dtype] * 1.01 + sums + 1e-7
    assert (error <= allowed).all(), (error - allowed).max()


def assert_is_the_reference(found, x, weight, bias=None):
    """With int8 activations sums are exact, so only the last bits of float32 may differ before rounding."""
    wide = reference(x.float(), weight, None if bias is None else bias.float()).double()
    sums = 0 if weight.scales.shape[1] == 1 else exact(x, weight)[1] * 2**-23
    allowed = wide.abs() * (UNIT[x.dtype] * 1.01 + 2**-22) + sums + 1e-6
    assert found.dtype == x.dtype and found.shape == wide.shape
    assert ((found.double() - wide).abs() <= allowed).all()


def in_factors(weight):
    """The weight with scales that are small multiples of one number per 256 columns, as quantization="int4" creates."""
    per_block = max(1, 256 // weight.group_size)
    generator = torch.Generator().manual_seed(5)
    rows, groups = weight.scales.shape
    units = (torch.rand(rows, -(-groups // per_block), generator=generator) * 0.01 + 0.001).bfloat16().float()
    factors = torch.randint(1, 9, (rows, groups), generator=generator)
    factors[0] = torch.arange(groups) % 8 + 1
    return replace(weight, scales=units.repeat_interleave(per_block, dim=1)[:, :groups] * factors)


SCHEMES = (
    pytest.param({"bits": 8, "int8_activations": True}, id="w8a8"),
    pytest.param({"bits": 8, "int8_activations": True, "symmetric": False}, id="w8a8-zeros"),
    pytest.param({"bits": 8}, id="w8"),
    pytest.param({"bits": 8, "symmetric": False}, id="w8-zeros"),
    pytest.param({"bits": 4}, id="w4"),
    pytest.param({"bits": 4, "symmetric": False}, id="w4-zeros"),
    pytest.param({"bits": 4, "symmetric": False, "int8_activations": True}, id="w4a8-zeros"),
)


def check(op, weight, dtype, bias, counts=(*ROWS, *MANY_ROWS)):
    packed = op.pack(weight)
    out_features, in_features = weight.shape
    offset = random(out_features, dtype=dtype, seed=1) if bias else None
    agrees = assert_is_the_reference if weight.int8_activations else assert_rounds
    for rows in counts:
        x = random(rows, in_features, dtype=dtype, seed=rows)
        agrees(op.quantized_linear(x, packed, offset), x, weight, offset)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_are_correct_for_any_shape_with_one_scale_per_row(op, scheme, dtype, shape):
    for bias in (False, True):
        check(op, quantized(*shape, **scheme), dtype, bias)


@pytest.mark.parametrize("shape", GROUPS, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [8, 4])
def test_results_are_correct_for_any_group_size(op, bits, symmetric, dtype, shape):
    check(op, quantized(*shape, bits=bits, symmetric=symmetric), dtype, bias=False)


@pytest.mark.parametrize("shape", [shape for shape in GROUPS if shape[2] <= 256], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [8, 4])
def test_groups_with_int8_activations_for_any_kind_of_scales(op, bits, symmetric, dtype, shape):
    any_scales = quantized(*shape, bits=bits, symmetric=symmetric, int8_activations=True)
    narrow = replace(any_scales, scales=any_scales.scales.bfloat16().float())
    multiples = in_factors(any_scales)
    for weight in (any_scales, narrow, multiples):
        check(op, weight, dtype, bias=weight is narrow, counts=(1, 4, 5, 97) if weight is multiples else (3, 13))
    # A step reads the scales, so the smaller formats must be used where possible.
    assert op.pack(any_scales).scales.dtype == torch.float32
    assert op.pack(narrow).scales.dtype == torch.bfloat16
    if bits == 4 and shape[2] in (8, 32, 64, 128):
        packed = op.pack(multiples)
        tiles = packed.values.numel() * 8 // (-(-shape[1] // 8) * 8)
        assert packed.scales.dtype == torch.bfloat16 and packed.scales.numel() == tiles * -(-shape[1] // 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_does_not_depend_on_other_rows(op, scheme, dtype):
    """A request's results are bit-identical alone and in any batch, at any row index."""
    for group_size, out_features, in_features in ((64, 100, 768), (None, 64, 385), (None, 200, 512)):
        packed = op.pack(quantized(out_features, in_features, group_size, **scheme))
        x = random(200, in_features, dtype=dtype, seed=1)
        bias = random(out_features, dtype=dtype, seed=2) if group_size is None else None
        alone = torch.cat([op.quantized_linear(row[None], packed, bias) for row in x])
        for rows in (*ROWS, 97, 200):
            for first in (0, 200 - rows):
                found = op.quantized_linear(x[first : first + rows], packed, bias)
                assert torch.equal(found, alone[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_activations_round_like_the_reference(op, dtype):
    """Covers ties (to even), the largest values, rows of zeros, and rows of tiny values."""
    weight = quantized(33, 67, int8_activations=True)
    packed = op.pack(weight)
    halves = torch.arange(-33, 34) + 0.5
    halves[-1] = 127  # the scale is 1
    tiny = torch.full((67,), torch.finfo(dtype).smallest_normal)
    rows = torch.stack([halves, -halves, torch.zeros(67), tiny, torch.linspace(-1, 1, 67) * 3000]).to(dtype)
    found = op.quantized_linear(rows, packed, None)
    assert_is_the_reference(found, rows, weight)
    assert (found[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_that_are_not_finite_affect_only_their_row(op, scheme, value, dtype):
    for in_features in (64, 67):
        packed = op.pack(quantized(70, in_features, **scheme))
        for rows, bad in ((20, 7), (2, 1), (1, 0)):
            x = random(rows, in_features, dtype=dtype, seed=1)
            x[bad, -1] = value
            found = op.quantized_linear(x, packed, None)
            assert not found[bad].isfinite().any() or not scheme.get("int8_activations")
            assert found[bad].isfinite().sum() <= 70 * 0.2  # weight-only, a factor of zero may be exact
            others = [row for row in range(rows) if row != bad]
            assert found[others].isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strided_inputs_and_weights(op, scheme):
    wide = random(9, 200, dtype=torch.bfloat16)
    for size in (96, 101):
        whole = quantized(90, 150, **scheme)
        zeros = None if whole.zero_points is None else whole.zero_points[::2]
        weight = QuantizedWeight(
            whole.values[::2, 3 : 3 + size], whole.scales[::2], zeros, size, whole.bits, whole.int8_activations
        )
        packed = op.pack(weight)
        agrees = assert_is_the_reference if weight.int8_activations else assert_rounds
        for x in (
            wide[:, 1 : 1 + size],
            wide[::3, 50 : 50 + size],
            wide[:1, :size].expand(7, size),
            random(size, 5, dtype=torch.bfloat16).t(),
            random(2, 3, size, dtype=torch.bfloat16),
        ):
            agrees(op.quantized_linear(x, packed, None), x, weight)
        assert op.quantized_linear(x[:, :0], packed, None).shape == (2, 0, 45)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_do_not_depend_on_the_number_of_threads(op, scheme):
    """The sizes are large enough to be divided among threads."""
    before = torch.get_num_threads()
    packed = op.pack(quantized(1000, 776, **scheme))
    try:
        for rows in (1, 16, 40, 200):
            x = random(rows, 776, dtype=torch.bfloat16, seed=1)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(op.quantized_linear(x, packed, None))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gated_products_are_bit_identical_to_separate_operations(op, scheme, dtype):
    silu_and_mul = KernelOps(LOADED.library).silu_and_mul
    for group_size, size, in_features in ((None, 16, 67), (32, 48, 96), (64, 1040, 320)):
        packed = op.pack(quantized(2 * size, in_features, group_size, **scheme))
        for rows in (1, 5, 97, 200):
            bias = random(2 * size, dtype=dtype, seed=2) if rows % 2 else None
            x = random(rows, in_features, dtype=dtype, seed=rows)
            found = op.quantized_linear_silu_and_mul(x, packed, bias)
            assert torch.equal(found, silu_and_mul(op.quantized_linear(x, packed, bias)))


def test_more_rows_than_one_conversion_handles(op):
    for scheme in ({"int8_activations": True}, {"bits": 4, "symmetric": False}):
        weight = quantized(20, 72, **scheme)
        x = random(2100, 72, dtype=torch.float16)
        packed = op.pack(weight)
        found = op.quantized_linear(x, packed, None)
        assert torch.equal(found[-3:], op.quantized_linear(x[-3:], packed, None))
        assert torch.equal(found[1151:1154], op.quantized_linear(x[1151:1154], packed, None))


def test_weights_quantized_on_load_are_packed_in_blocks(op):
    """4.3 bits per weight; with the reference's scales it would be 5."""
    weight = replace(quantized(64, 640, 32, bits=4, symmetric=False), int8_activations=True)
    round_rows(random(64, 640), weight, slice(0, 64))
    packed = op.pack(weight)
    assert packed.block_size == 256 and packed.scales.dtype == torch.bfloat16
    assert packed.values.nbytes + packed.scales.nbytes + packed.zero_points.nbytes == 64 * (640 // 2 + 3 * 2 + 20)


def test_the_packed_weight_has_the_expected_size(op):
    for bits in (8, 4):
        assert op.pack(quantized(128, 768, 32, bits=bits)).values.nbytes == 128 * 768 * bits // 8


def test_unsupported_cases_have_reasons(op):
    facts = {
        "in_features": 256,
        "out_features": 64,
        "bias": False,
        "bits": 8,
        "group_size": 256,
        "symmetric": True,
        "int8_activations": False,
    }

    def reasons(dtype="bfloat16", **changed):
        return " ".join(op.supports(OpCase("quantized_linear", dtype, {**facts, **changed})))

    assert not reasons() and not reasons("float32", bits=4, group_size=32) and not reasons(int8_activations=True)
    assert "float64" in reasons("float64")
    assert "3 bits" in reasons(bits=3)
    assert "groups of 20" in reasons(bits=4, group_size=20)
    assert not reasons(int8_activations=True, group_size=128)
    assert "at most 256 columns" in reasons(int8_activations=True, in_features=1024, group_size=512)
    many = MOST_INT8_COLUMNS + 1
    assert "32 bits" in reasons(int8_activations=True, in_features=many, group_size=many)
    facts["size"] = facts.pop("out_features")
    assert not op.supports_silu(OpCase("quantized_linear_silu_and_mul", "bfloat16", facts))
    narrow = OpCase("quantized_linear_silu_and_mul", "bfloat16", {**facts, "size": 40})
    assert "no multiple of 16" in " ".join(op.supports_silu(narrow))


def test_the_longest_sum_of_bytes_fits(op):
    ends = torch.full((1, MOST_INT8_COLUMNS), -128, dtype=torch.int8)
    weight = QuantizedWeight(ends, torch.ones(1, 1), None, MOST_INT8_COLUMNS, 8, int8_activations=True)
    x = torch.full((1, MOST_INT8_COLUMNS), 127.0)
    for sign in (1, -1):
        found = op.quantized_linear(sign * x, op.pack(weight), None)
        assert found.item() == sign * -128.0 * 127 * MOST_INT8_COLUMNS
