"""Packed tensors: any range of rows and columns equals that range of the whole matrix; damaged tensors are errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.interface import PackedFormat
from mvllm.layers.quantization.packed_matrix import PackedMatrix, Packing
from mvllm.layers.quantization.packing_formats import AWQPacking, GPTQPacking, IntQuantizedPacking, PackQuantizedPacking
from tests.helpers.paged_driver import make_context
from tests.helpers.quantized_zoo import (
    Packer,
    int_quantized,
    pack_awq,
    pack_gptq,
    pack_gptq_v2,
    pack_quantized,
    round_matrix,
)

OUT, IN = 40, 48
WHOLE = slice(0, OUT), slice(0, IN)
BANDS = [WHOLE, (slice(3, 22), slice(0, IN)), (slice(16, 40), slice(5, 31)), (slice(7, 8), slice(47, 48))]
PACKINGS: dict[str, tuple[Packing, Packer, int]] = {
    "awq": (AWQPacking(), pack_awq, 4),
    "gptq": (GPTQPacking(zeros_less_one=True), pack_gptq, 4),
    "gptq-8": (GPTQPacking(zeros_less_one=True), pack_gptq, 8),
    "gptq-v2": (GPTQPacking(zeros_less_one=False), pack_gptq_v2, 4),
    "words": (PackQuantizedPacking(), pack_quantized, 4),
    "words-8": (PackQuantizedPacking(), pack_quantized, 8),
    "integers": (IntQuantizedPacking(), int_quantized, 8),
}


def fill(matrix: PackedMatrix, tensors: dict[str, torch.Tensor]) -> PackedMatrix:
    for name, target in matrix.targets():
        assert tuple(tensors[name].shape) == tuple(target.source_shape), name
        target.parameter.data[target.destination] = tensors[name][target.source].to(target.parameter.dtype)
    return matrix


def build(packing: Packing, how: PackedFormat, rows: slice, columns: slice) -> PackedMatrix:
    part = Part("m", OUT, rows, slice(0, rows.stop - rows.start))
    return PackedMatrix(make_context(), MatrixLayout((part,), IN, columns, part.destination.stop), packing, how)


@pytest.mark.parametrize(("rows", "columns"), BANDS, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_any_range_of_rows_and_columns_is_unpacked_from_the_words_that_contain_it(
    packing: str, rows: slice, columns: slice
) -> None:
    reader, pack, bits = PACKINGS[packing]
    rounded = round_matrix(torch.randn(OUT, IN), bits, None, symmetric=False)
    matrix = build(reader, PackedFormat(bits, None, symmetric=False), rows, columns)
    weight, order = fill(matrix, pack("m", rounded)).read()
    assert order is None
    torch.testing.assert_close(weight.dequantize(), rounded.floats()[rows, columns])


@pytest.mark.parametrize(("rows", "columns"), [WHOLE, (slice(8, 24), slice(16, 48)), (slice(0, 40), slice(32, 48))])
@pytest.mark.parametrize("packing", [name for name, (_, _, bits) in PACKINGS.items() if bits == 4])
def test_a_range_of_columns_has_the_scales_of_its_groups(packing: str, rows: slice, columns: slice) -> None:
    reader, pack, bits = PACKINGS[packing]
    rounded = round_matrix(torch.randn(OUT, IN), bits, 16, symmetric=False)
    matrix = build(reader, PackedFormat(bits, 16, symmetric=False), rows, columns)
    weight, _ = fill(matrix, pack("m", rounded)).read()
    assert weight.scales.shape[1] == (columns.stop - columns.start) // 16
    torch.testing.assert_close(weight.dequantize(), rounded.floats()[rows, columns])


def test_the_last_group_may_have_fewer_columns() -> None:
    rounded = round_matrix(torch.randn(OUT, IN), 4, 32, symmetric=True)
    weight, _ = fill(build(PackQuantizedPacking(), PackedFormat(4, 32), *WHOLE), pack_quantized("m", rounded)).read()
    assert weight.zero_points is None and weight.scales.shape == (OUT, 2)
    torch.testing.assert_close(weight.dequantize(), rounded.floats())


@pytest.mark.parametrize("zero", [0, 1, 8, 15])
def test_gptq_zero_points_are_stored_minus_one_with_wrap_around(zero: int) -> None:
    rounded = round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=False)
    rounded = dataclasses.replace(rounded, zeros=rounded.zeros * 0 + zero)
    matrix = build(PACKINGS["gptq"][0], PackedFormat(4, 16, symmetric=False), *WHOLE)
    weight, _ = fill(matrix, pack_gptq("m", rounded)).read()
    assert weight.zero_points is not None and (weight.zero_points == zero - 8).all()
    torch.testing.assert_close(weight.dequantize(), rounded.floats())


def test_reordered_columns_are_multiplied_with_reordered_inputs() -> None:
    how = PackedFormat(4, 16, order_tensor="g_idx")
    rounded = round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=True, act_order=True)
    product, weight = fill(build(PACKINGS["gptq"][0], how, *WHOLE), pack_gptq("m", rounded)).finish()
    x = torch.randn(3, IN)
    torch.testing.assert_close(product(x, weight, None), x @ rounded.floats().T)
    assert not torch.equal(weight.values[:, :4], torch.from_numpy(rounded.values[:, :4] - 8).to(torch.int8))


def test_groups_of_the_wrong_size_are_an_error() -> None:
    how = PackedFormat(4, 16, order_tensor="g_idx")
    tensors = pack_gptq("m", round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=True, act_order=True))
    tensors["m.g_idx"][:] = 0
    with pytest.raises(ModelError, match=r"m: the columns' groups .g_idx. are not groups of 16 columns each"):
        fill(build(PACKINGS["gptq"][0], how, *WHOLE), tensors).read()


def test_parts_with_different_orders_are_refused() -> None:
    how = PackedFormat(4, 16, order_tensor="g_idx")
    rounded = round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=True, act_order=True)
    parts = tuple(Part(name, OUT, WHOLE[0], slice(OUT * i, OUT * i + OUT)) for i, name in enumerate("ab"))
    matrix = PackedMatrix(make_context(), MatrixLayout(parts, IN, WHOLE[1], 2 * OUT), PACKINGS["gptq"][0], how)
    tensors = {**pack_gptq("a", rounded), **pack_gptq("b", rounded)}
    fill(matrix, tensors).read()
    tensors["b.g_idx"] = tensors["b.g_idx"].flip(0)
    with pytest.raises(ModelError, match=r"a, b are one matrix .* orders their columns differently"):
        fill(matrix, tensors).read()


def test_zero_points_in_a_symmetric_quantization_are_refused() -> None:
    rounded = round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=False)
    matrix = build(PACKINGS["gptq"][0], PackedFormat(4, 16, symmetric=True), *WHOLE)
    with pytest.raises(ModelError, match=r"m: config.json says that the quantization is symmetric"):
        fill(matrix, pack_gptq("m", rounded)).read()


def test_the_provider_prepares_the_weight_and_multiplies_with_the_prepared_weight() -> None:
    from mvllm.platform.op_provider import OpCase, OpProvider

    asked: list[OpCase] = []

    def supports(case: OpCase) -> list[str]:
        asked.append(case)
        return []

    provider = OpProvider(
        "quantized_linear",
        "dense",
        lambda x, weight, bias: x @ weight.T,
        supports=supports,
        prepare=lambda weight: weight.dequantize(),
    )
    ctx = make_context(providers=[provider])
    layout = MatrixLayout((Part("m", OUT, WHOLE[0], WHOLE[0]),), IN, WHOLE[1], OUT, bias=True)
    rounded = round_matrix(torch.randn(OUT, IN), 4, 16, symmetric=False)
    matrix = PackedMatrix(ctx, layout, AWQPacking(), PackedFormat(4, 16, symmetric=False))
    product, weight = fill(matrix, pack_awq("m", rounded)).finish()
    assert isinstance(weight, torch.Tensor) and not isinstance(weight, nn.Parameter)
    x = torch.randn(2, IN)
    torch.testing.assert_close(product(x, weight, None), x @ rounded.floats().T)
    assert dict(asked[0].facts) == {
        "in_features": IN,
        "out_features": OUT,
        "bias": True,
        "bits": 4,
        "group_size": 16,
        "symmetric": False,
        "int8_activations": False,
    }
