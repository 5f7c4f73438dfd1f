"""Compiled products with block-quantized (GGUF) weights against float64, with the instruction set of the process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mvllm.ops.block_formats import BLOCK_FORMATS
from mvllm.ops.block_quantized_linear import block_quantized_linear as reference
from mvllm.plugin_api import BlockQuantizedPart, BlockQuantizedWeight, OpCase
from mvllm.testing.block_quantized_cases import block_quantized_weight
from mvllm_cpu import kernels
from mvllm_cpu.block_quantized_linear import FORMATS, BlockQuantizedLinear
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.replay import Replay

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""Unit roundoff: the largest relative error of rounding a result."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 33)
MIXED = (("q4_k", 40), ("q4_k", 24), ("q6_k", 33), ("q8_0", 7))
"""Parts like those of a fused projection: different formats, and numbers of rows that tiles do not divide."""


@pytest.fixture(scope="module")
def op() -> BlockQuantizedLinear:
    return BlockQuantizedLinear(LOADED.library)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts_of(format, rows=65):
    return MIXED if format == "mixed" else ((format, rows),)


def weight_of(format, in_features, int8_activations=False, rows=65):
    return block_quantized_weight(parts_of(format, rows), in_features, int8_activations)


def sizes_of(format):
    """Values of in_features: one block, several blocks, and more than a kernel unpacks at a time."""
    return (256, 1280) if format == "mixed" or BLOCK_FORMATS[format].block_values == 256 else (32, 96, 256, 416)


def assert_rounds(found, x, weight, bias=None):
    """Fails if an error exceeds the rounding of the result and of float32 sums, with minima subtracted separately."""
    assert found.dtype == x.dtype
    if weight.int8_activations and x.dtype != torch.float32:
        wide = x.double().view(len(x), -1, 32)
        scales = x.float().view(len(x), -1, 32).abs().amax(dim=-1, keepdim=True) / 127
        x = ((wide.float() / scales.where(scales > 0, 1.0)).round() * scales.double()).view(x.shape)
    exact = weight.dequantize().double()
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    assert found.shape == expected.shape
    size = x.double().abs() @ exact.abs().amax(dim=1, keepdim=True).expand_as(exact).T
    allowed = expected.abs() * UNIT[found.dtype] * 1.01 + size * 2**-24 * (weight.in_features**0.5 + 4) + 1e-7
    error = (found.double() - expected).abs()
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_results_are_correct_for_any_format_and_shape(op, format, int8_activations, dtype):
    for in_features in sizes_of(format):
        for out_features in (1, 97):
            weight = weight_of(format, in_features, int8_activations, out_features)
            packed = op.pack(weight)
            for rows in (*ROWS, 97, 193):
                x = random(rows, in_features, dtype=dtype, seed=rows)
                bias = random(weight.shape[0], dtype=dtype, seed=1) if rows % 2 else None
                assert_rounds(op.block_quantized_linear(x, packed, bias), x, weight, bias)


@pytest.mark.parametrize("format", FORMATS)
def test_the_packed_weight_equals_the_dequantized_weight(op, format):
    """Multiplies by the identity matrix, so that only the weight is rounded."""
    weight = weight_of(format, 512, rows=64)
    found = op.block_quantized_linear(torch.eye(512), op.pack(weight), None)
    torch.testing.assert_close(found.T, weight.dequantize(), rtol=2**-22, atol=2**-23)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_looked_up_rows_are_bit_identical_to_the_reference(op, format, dtype):
    weight = replace(weight_of(format, 512, rows=70), dtype=dtype)
    packed, table = op.pack(weight), weight.dequantize().to(dtype)
    count = len(table)
    for ids in (torch.tensor([3, 69, 0, 33, 3]), torch.arange(count, dtype=torch.int32).flip(0).view(2, -1)):
        found = op.lookup(ids, packed)
        assert found.dtype == dtype and torch.equal(found, table[ids.long()])
    of_others = op.lookup(torch.tensor([9, 10, 10 + count, 9 + count]), packed, 10)
    assert torch.equal(of_others, torch.stack([0 * table[0], table[0], 0 * table[0], table[-1]]))


def test_packed_weights_have_the_size_of_the_file(op):
    """A decode step reads all packed bytes."""
    for format in FORMATS:
        weight = weight_of(format, 1024, rows=128)
        stored = sum(part.data.nbytes for part in weight.parts)
        assert stored <= op.pack(weight).data.nbytes <= 1.04 * stored


@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_a_row_does_not_depend_on_other_rows(op, format, int8_activations):
    """A request's results are bit-identical alone and in any batch, at any row index."""
    packed = op.pack(weight_of(format, 768, int8_activations, 100))
    x = random(200, 768, dtype=torch.bfloat16, seed=1)
    alone = torch.cat([op.block_quantized_linear(row[None], packed, None) for row in x])
    for rows in (*ROWS, 97, 200):
        for first in (0, 200 - rows):
            found = op.block_quantized_linear(x[first : first + rows], packed, None)
            assert torch.equal(found, alone[first : first + rows])


@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
def test_results_do_not_depend_on_the_number_of_threads(op, int8_activations):
    """The sizes are large enough to be divided among threads."""
    before = torch.get_num_threads()
    packed = op.pack(block_quantized_weight((("q4_k", 500), ("q6_k", 500)), 768, int8_activations))
    try:
        for rows in (1, 16, 40, 200):
            x = random(rows, 768, dtype=torch.bfloat16, seed=1)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(op.block_quantized_linear(x, packed, None))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_replayed_by_any_number_of_threads(op, threads):
    """With one row, one parallel region executes several calls. With many rows, each product opens a region."""
    ops, before = KernelOps(LOADED.library), torch.get_num_threads()
    gate_up = op.pack_halves(block_quantized_weight((("q4_k", 1024), ("q6_k", 1024)), 768, True))
    down, norm = op.pack(weight_of("q5_k", 1024, True, 768)), torch.ones(768, dtype=torch.bfloat16)

    def function(x):
        for _ in range(2):
            x = ops.rms_norm(x, norm, 1e-5)
            x = op.block_quantized_linear(op.block_quantized_linear_silu_and_mul(x, gate_up, None), down, None)
        return x

    compiled = Replay(LOADED.library).compile(function, dynamic=True)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 30):
            for seed in range(3):
                x = random(rows, 768, seed=seed, dtype=torch.bfloat16)
                with torch.inference_mode():
                    assert torch.equal(compiled(x), function(x))
        assert None not in compiled._programs.values()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
def test_gated_products_are_bit_identical_to_separate_operations(op, int8_activations, dtype):
    silu_and_mul = KernelOps(LOADED.library).silu_and_mul
    uneven = (("q4_k", 80), ("q6_k", 16), ("q5_k", 96))
    for parts in ((("q4_0", 32),), (("q4_k", 112), ("q6_k", 112)), uneven, (("q8_0", 1040), ("q4_1", 1040))):
        weight = block_quantized_weight(parts, 256, int8_activations)
        packed, halves = op.pack(weight), op.pack_halves(weight)
        for rows in (1, 5, 97, 200):
            bias = random(weight.shape[0], dtype=dtype, seed=2) if rows % 2 else None
            x = random(rows, 256, dtype=dtype, seed=rows) * 0.1
            found = op.block_quantized_linear_silu_and_mul(x, halves, bias)
            assert torch.equal(found, silu_and_mul(op.block_quantized_linear(x, packed, bias)))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_int8_activations_round_like_the_reference(op, dtype):
    """Covers ties (to even), the largest values, runs of zeros, and runs of tiny values."""
    weight = weight_of("q8_0", 96, int8_activations=True)
    halves = torch.arange(-48, 48) + 0.5
    halves[::32] = 127  # the scale is 1
    tiny = torch.full((96,), torch.finfo(dtype).smallest_normal)
    zeros = halves.clone()
    zeros[32:64] = 0
    rows = torch.stack([halves, -halves, zeros, tiny, torch.linspace(-1, 1, 96) * 3000]).to(dtype)
    found = op.block_quantized_linear(rows, op.pack(weight), None)
    torch.testing.assert_close(found, reference(rows, weight, None), rtol=2 * UNIT[dtype], atol=1e-6)


@pytest.mark.parametrize("int8_activations", [False, True], ids=["weight-only", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_affect_only_their_row(op, value, int8_activations):
    for format in ("q4_k", "q8_0", "q6_k"):
        packed = op.pack(weight_of(format, 256, int8_activations))
        for rows, bad in ((20, 7), (2, 1), (1, 0)):
            x = random(rows, 256, dtype=torch.bfloat16, seed=1)
            x[bad, -1] = value
            found = op.block_quantized_linear(x, packed, None)
            assert found[bad].isfinite().sum() <= 65 * 0.2  # weight-only, a factor of zero may be exact
            others = [row for row in range(rows) if row != bad]
            assert found[others].isfinite().all()


def test_strided_inputs_and_weights(op):
    whole = weight_of("q4_k", 512, int8_activations=True, rows=90)
    [part] = whole.parts
    strided = BlockQuantizedPart("q4_k", part.data[::2, 144:])
    weight = BlockQuantizedWeight((strided,), 256, int8_activations=True)
    packed, wide = op.pack(weight), random(9, 600, dtype=torch.bfloat16)
    for x in (wide[:, 1:257], wide[::3, 50:306], wide[:1, :256].expand(7, 256), random(256, 5).bfloat16().t()):
        assert_rounds(op.block_quantized_linear(x, packed, None), x, weight)
    x = random(2, 3, 256, dtype=torch.bfloat16)
    assert torch.equal(
        op.block_quantized_linear(x, packed, None)[1, 2:], op.block_quantized_linear(x[1, 2:], packed, None)
    )
    assert op.block_quantized_linear(x[:, :0], packed, None).shape == (2, 0, 45)


def test_more_rows_than_one_conversion_handles(op):
    for int8_activations in (False, True):
        packed = op.pack(weight_of("q5_k", 256, int8_activations, 20))
        x = random(2100, 256, dtype=torch.float16)
        found = op.block_quantized_linear(x, packed, None)
        assert torch.equal(found[-3:], op.block_quantized_linear(x[-3:], packed, None))
        assert torch.equal(found[1151:1154], op.block_quantized_linear(x[1151:1154], packed, None))


def test_float32_is_not_rounded(op):
    weight = weight_of("q4_k", 256, int8_activations=True)
    x = random(5, 256)
    found = op.block_quantized_linear(x, op.pack(weight), None)
    assert torch.equal(found, op.block_quantized_linear(x, op.pack(replace(weight, int8_activations=False)), None))


def test_unsupported_cases_have_reasons(op):
    facts = {
        "in_features": 256,
        "out_features": 64,
        "bias": False,
        "formats": ("q4_k", "q6_k"),
        "int8_activations": True,
    }

    def reasons(dtype="bfloat16", **changed):
        return " ".join(op.supports(OpCase("block_quantized_linear", dtype, {**facts, **changed})))

    assert not reasons() and not reasons("float32")
    assert "float64" in reasons("float64")
    assert "q2_k has no kernel" in reasons(formats=("q4_k", "q2_k"))
    facts["size"] = facts.pop("out_features")
    assert not op.supports_silu(OpCase("block_quantized_linear_silu_and_mul", "bfloat16", facts))
    narrow = OpCase("block_quantized_linear_silu_and_mul", "bfloat16", {**facts, "size": 40})
    assert "no multiple of 16" in " ".join(op.supports_silu(narrow))
