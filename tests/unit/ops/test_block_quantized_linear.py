"""The reference of `block_quantized_linear` against its definition, and its formats against gguf's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.block_formats import BLOCK_FORMATS, dequantize_rows
from mvllm.ops.block_quantized_linear import BlockQuantizedPart, BlockQuantizedWeight, block_quantized_linear
from mvllm.testing.block_quantized_cases import random_blocks
from mvllm.testing.op_cases import exact, op_calls, tolerance

OPERATIONS = ("block_quantized_linear", "block_quantized_linear_silu_and_mul")


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_equals_the_definition_for_every_format(op: str, dtype: str) -> None:
    for trial in op_calls(op, dtype):
        found, wanted = SCHEMAS[op].reference(*trial.make()), exact(trial)
        off = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert off < tolerance(dtype), f"{trial}: off by {off:.2g}"


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_dequantized_values_equal_those_of_gguf_bit_for_bit(format: str) -> None:
    in_file = GGMLQuantizationType[format.upper()]
    typical = random_blocks(format, 40, 768, seed=3)
    any_bytes = torch.randint(0, 256, (400, typical.shape[1]), dtype=torch.uint8, generator=torch.Generator())
    for data in (typical, any_bytes):
        with np.errstate(all="ignore"):
            wanted = torch.from_numpy(dequantize(data.numpy(), in_file).astype(np.float32))
        found = dequantize_rows(data, format)
        assert found.dtype == torch.float32 and found.shape == (len(data), 768)
        same = found.view(torch.int32) == wanted.view(torch.int32)
        assert (same | (found.isnan() & wanted.isnan())).all()


def test_sizes_are_those_of_the_file_types() -> None:
    for name, known in BLOCK_FORMATS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]] == (known.block_values, known.block_bytes)
        assert known.row_bytes(512) == 512 // known.block_values * known.block_bytes


def identity(int8_activations: bool) -> BlockQuantizedWeight:
    """q8_0 with ones on the diagonal."""
    data = torch.zeros(64, 2, 34, dtype=torch.uint8)
    data[:, :, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    for row in range(64):
        data[row, row // 32, 2 + row % 32] = 1
    return BlockQuantizedWeight((BlockQuantizedPart("q8_0", data.view(64, -1)),), 64, int8_activations)


def test_16_bit_inputs_are_rounded_in_blocks_of_32_and_float32_inputs_are_not() -> None:
    x = torch.zeros(2, 64)
    x[0, :3], x[0, 32:35] = torch.tensor([127.0, 2.5, 3.5]), torch.tensor([-1270.0, 4.0, 26.0])
    rounded = x.clone()
    rounded[0, :3], rounded[0, 32:35] = torch.tensor([127.0, 2.0, 4.0]), torch.tensor([-1270.0, 0.0, 30.0])
    for dtype in (torch.bfloat16, torch.float16):
        found = block_quantized_linear(x.to(dtype), identity(True), None)
        assert torch.equal(found, rounded.to(dtype))
    assert torch.equal(block_quantized_linear(x, identity(True), None), x)
    assert torch.equal(block_quantized_linear(x.bfloat16(), identity(False), None), x.bfloat16())


def test_leading_dimensions_are_kept_and_rows_are_independent() -> None:
    x = torch.randn(2, 3, 64).bfloat16()
    found = block_quantized_linear(x, identity(True), torch.ones(64).bfloat16())
    assert found.shape == (2, 3, 64)
    assert torch.equal(block_quantized_linear(x[1, 2], identity(True), torch.ones(64).bfloat16()), found[1, 2])
