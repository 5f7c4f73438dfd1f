"""The reference of `float8_linear`: its codes and roundings are torch's."""

from __future__ import annotations

import torch

from mvllm.ops.float8_linear import LARGEST, Float8Weight, float8_linear

EYE = torch.eye(4).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_code_has_the_value_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = Float8Weight(codes, torch.tensor([[2.0]]), 16, 16).dequantize()
    torch.testing.assert_close(found, codes.view(torch.float8_e4m3fn).float() * 2, atol=0, rtol=0, equal_nan=True)


def numbers() -> torch.Tensor:
    """Every value of E4M3, the midpoints between neighbours and values next to them, and values beyond the range."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    known = codes[codes.isfinite()].unique()
    middle = (known[1:] + known[:-1]) / 2
    more = [middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9))]
    return torch.cat([known, *more, torch.tensor([460.0, 1e6, -1e6])])


def test_static_inputs_are_rounded_as_torch_rounds_and_clamped() -> None:
    weight = Float8Weight(EYE, torch.ones(1, 1), 4, 4, "static", torch.tensor([0.5]))
    x = numbers()
    x = torch.nn.functional.pad(x, (0, -len(x) % 4)).view(-1, 4)
    expected = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(float8_linear(x * 0.5, weight, None), expected)


def test_dynamic_inputs_have_a_scale_per_group_and_rows_are_independent() -> None:
    weight = Float8Weight(EYE, torch.ones(1, 2), 4, 2, "dynamic")
    x = torch.tensor([[448.0, 17.1, 0.4480, 0.0171], [0.0, 0.0, -896.0, 15.0]])
    found = float8_linear(x, weight, None)
    torch.testing.assert_close(found, torch.tensor([[448.0, 18.0, 0.448, 0.018], [0.0, 0.0, -896.0, 15.0]]))
    assert torch.equal(float8_linear(x[1], weight, None), found[1])


def test_a_row_of_zeros_gives_the_bias_and_leading_dimensions_are_kept() -> None:
    weight, bias = Float8Weight(EYE, torch.ones(1, 1), 4, 4, "dynamic"), torch.arange(4.0)
    assert torch.equal(float8_linear(torch.zeros(2, 3, 4), weight, bias), bias.expand(2, 3, 4))
    assert float8_linear(torch.zeros(4), weight, None).shape == (4,)
