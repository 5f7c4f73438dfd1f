"""The reference of `block_quantized_linear`: rounded inputs, independent rows."""

from __future__ import annotations

import torch

from mvllm.ops.block_quantized_linear import BlockQuantizedPart, BlockQuantizedWeight, block_quantized_linear


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
