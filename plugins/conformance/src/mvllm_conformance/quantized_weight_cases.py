"""Test cases of linear operations with integer and 8-bit float weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mvllm.plugin_api import Float8Inputs, Float8Weight, QuantizedWeight
from mvllm_conformance.op_call import ROWS, OpCall, random_tensor

_QUANTIZED = (  # bits, group_size (None for a row), symmetric, int8_activations
    (8, None, True, True),
    (8, None, True, False),
    (8, 32, False, False),
    (4, 32, True, False),
    (4, 32, False, False),
    (4, 128, False, False),
    (4, None, True, False),
    (8, 32, False, True),
    (4, 32, False, True),
)


def quantized_linear_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """Cases of `quantized_linear` or `quantized_linear_silu_and_mul`."""
    for rows in ROWS:
        for in_features, out_features in ((64, 96), (384, 320), (80, 33)):  # sizes that groups do not divide
            for bits, group_size, symmetric, int8_activations in _QUANTIZED:
                gated = op == "quantized_linear_silu_and_mul"
                facts = {
                    "in_features": in_features,
                    **({"size": out_features} if gated else {"out_features": out_features}),
                    "bias": rows == 3,
                    "bits": bits,
                    "group_size": min(group_size or in_features, in_features),
                    "symmetric": symmetric,
                    "int8_activations": int8_activations,
                }
                yield OpCall(
                    op,
                    facts,
                    lambda rows=rows, facts=facts, o=out_features * (1 + gated): (  # type: ignore[misc]
                        rows_of_quantized(dtype, rows, facts["in_features"]),
                        quantized_weight(facts, o),
                        random_tensor(dtype, o, seed=2) if facts["bias"] else None,
                    ),
                    weight=1,
                )


def rows_of_quantized(dtype: torch.dtype, rows: int, size: int) -> torch.Tensor:
    """Inputs whose rounding to int8 has one correct result, however the scale is computed.

    The largest magnitude of a row is 127 times a power of two, and no value is near the middle of two multiples of that
    power.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-31, 32, (rows, size), generator=generator)
    parts = torch.randint(-1, 2, (rows, size), generator=generator) * 0.25
    x = whole + parts
    x[:, 3] = 127.0 * (1 - 2 * (torch.arange(rows) % 2))
    return (x * 2.0 ** (torch.arange(rows)[:, None] % 5 - 7)).to(dtype)


def quantized_weight(facts: dict[str, Any], out_features: int, seed: int = 1) -> QuantizedWeight:
    """A random weight with these facts and `in_features`."""
    generator = torch.Generator().manual_seed(seed)
    shape = out_features, facts["in_features"]
    groups = out_features, -(-facts["in_features"] // facts["group_size"])
    middle = 2 ** (facts["bits"] - 1)
    lowest = -middle + (facts["bits"] == 8 and facts["symmetric"])

    def draw(low: int, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(low, middle, shape, generator=generator).to(torch.int8)

    return QuantizedWeight(
        draw(lowest, shape),
        (torch.rand(groups, generator=generator) + 0.5) / (middle * facts["in_features"] ** 0.5),
        None if facts["symmetric"] else draw(-middle, groups),
        facts["group_size"],
        facts["bits"],
        facts["int8_activations"],
    )


def exact_quantized(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The exact result, in float64."""
    groups = torch.arange(weight.shape[1]) // weight.group_size
    values = weight.values.double()
    if weight.zero_points is not None:
        values = values - weight.zero_points.double()[:, groups]
    inputs = x.double()
    if weight.int8_activations:
        scales = inputs.abs().amax(dim=-1, keepdim=True) / 127
        inputs = (inputs / scales).round() * scales
    product = inputs @ (values * weight.scales.double()[:, groups]).T
    return product if bias is None else product + bias.double()


_FLOAT8: tuple[tuple[int | None, int | None, Float8Inputs], ...] = (  # block_rows, block_columns; None for all
    (None, None, "dynamic"),
    (None, None, "static"),
    (1, None, "dynamic"),
    (40, None, "static"),  # several matrices, one below the other
    (1, None, "floats"),
    (32, 32, "dynamic"),
    (128, 128, "dynamic"),
    (32, 64, "floats"),
)


def float8_linear_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """Cases of `float8_linear`, with inputs that are exact in 8 bits."""
    for rows in ROWS:
        for in_features, out_features in ((64, 96), (384, 320), (80, 33)):  # sizes that blocks do not divide
            for block_rows, block_columns, inputs in _FLOAT8:
                facts = {
                    "in_features": in_features,
                    "out_features": out_features,
                    "bias": rows == 3,
                    "block_rows": min(block_rows or out_features, out_features),
                    "block_columns": min(block_columns or in_features, in_features),
                    "inputs": inputs,
                }
                yield OpCall(
                    op,
                    facts,
                    lambda rows=rows, facts=facts: (  # type: ignore[misc]
                        rows_of_float8(dtype, rows, facts),
                        float8_weight(facts),
                        random_tensor(dtype, facts["out_features"], seed=2) if facts["bias"] else None,
                    ),
                    weight=1,
                )


def rows_of_float8(dtype: torch.dtype, rows: int, facts: dict[str, Any]) -> torch.Tensor:
    """Inputs that are exact in every 8-bit float format: powers of two."""
    shape = rows, facts["in_features"]
    if facts["inputs"] == "floats":
        return random_tensor(dtype, *shape)
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** -torch.randint(0, 7, shape, generator=generator)
    return (size * torch.randint(-1, 2, shape, generator=generator)).to(dtype)


def float8_weight(facts: dict[str, Any], seed: int = 1) -> Float8Weight:
    """A random weight with these facts and sizes."""
    shape, block = (facts["out_features"], facts["in_features"]), (facts["block_rows"], facts["block_columns"])
    groups = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    scales = torch.rand(*groups, generator=torch.Generator().manual_seed(3)) + 0.5
    return Float8Weight(
        random_tensor(torch.float32, *shape, seed=seed, scale=100).to(torch.float8_e4m3fn).view(torch.uint8),
        scales / (100 * shape[1] ** 0.5),
        *block,
        facts["inputs"],
        torch.tensor([2.0**-6]) if facts["inputs"] == "static" else None,
    )


def exact_float8(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The exact result in float64, for inputs that are exact in 8 bits."""
    scales = weight.scales.double()
    for dim, size in enumerate((weight.block_rows, weight.block_columns)):
        scales = scales.index_select(dim, torch.arange(weight.shape[dim]) // size)
    product = x.double() @ (weight.codes.view(torch.float8_e4m3fn).double() * scales).T
    return product if bias is None else product + bias.double()
