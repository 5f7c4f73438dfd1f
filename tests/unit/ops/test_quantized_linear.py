"""The reference of `quantized_linear`: exact sums, roundings, independent rows."""

from __future__ import annotations

import torch

from mvllm.ops.quantized_linear import QuantizedWeight, quantized_linear


def make_weight(in_features: int, **facts: object) -> QuantizedWeight:
    values = torch.full((3, in_features), -128, dtype=torch.int8)
    return QuantizedWeight(values, torch.ones(3, 1), None, in_features, 8, **facts)  # type: ignore[arg-type]


def test_integer_sums_are_exact_for_any_length() -> None:
    weight = make_weight(70_000, int8_activations=True)
    x = torch.full((1, 70_000), 127.0)
    x[0, -1] = 126.0
    assert quantized_linear(x, weight, None).double().tolist() == [[-128.0 * (127 * 69_999 + 126)] * 3]


def test_a_row_of_zeros_gives_the_bias_and_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (5, 64), dtype=torch.int8, generator=generator)
    weight = QuantizedWeight(values, torch.rand(5, 1, generator=generator), None, 64, 8, int8_activations=True)
    x, bias = torch.randn(4, 64, generator=generator), torch.randn(5, generator=generator)
    x[2] = 0
    together = quantized_linear(x, weight, bias)
    assert torch.equal(together[2], bias)
    for row in range(4):
        assert torch.equal(quantized_linear(x[row], weight, bias), together[row])


def test_int8_inputs_are_rounded_halves_to_even_with_the_rows_own_scale() -> None:
    weight = QuantizedWeight(torch.eye(4, dtype=torch.int8), torch.ones(4, 1), None, 4, 8, int8_activations=True)
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [-12.7, 0.26, 0.24, 0.0]])
    found = quantized_linear(x, weight, None)
    torch.testing.assert_close(found, torch.tensor([[127.0, 0.0, 2.0, -2.0], [-12.7, 0.3, 0.2, 0.0]]))


def test_leading_dimensions_are_kept() -> None:
    weight = make_weight(8)
    assert quantized_linear(torch.randn(2, 5, 8), weight, None).shape == (2, 5, 3)
    assert quantized_linear(torch.randn(8), weight, None).shape == (3,)
