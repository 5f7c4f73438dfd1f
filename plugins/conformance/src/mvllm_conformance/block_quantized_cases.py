"""Test cases of linear operations with block-quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mvllm.extension_api.testing import BLOCK_FORMATS, INPUT_BLOCK
from mvllm.plugin_api import BlockQuantizedPart, BlockQuantizedWeight
from mvllm_conformance.op_call import ROWS, OpCall, random_tensor

_KINDS = (  # in_features, (format, rows) of each part; half of all rows is a multiple of 16
    *((256 if known.block_values == 256 else 96, ((name, 96),)) for name, known in BLOCK_FORMATS.items()),
    (512, (("q4_k", 160), ("q4_k", 64), ("q6_k", 64))),
    (256, (("q8_0", 33), ("q5_k", 63))),
)

_HALF_OFFSETS = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "mxfp4": (),
    "q3_k": (108,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}


def random_blocks(format: str, rows: int, in_features: int, seed: int = 1) -> torch.Tensor:
    """Random blocks [rows, row_bytes], uint8, whose scales are finite and of a similar size."""
    known = BLOCK_FORMATS[format]
    generator = torch.Generator().manual_seed(seed)
    shape = rows * (in_features // known.block_values), known.block_bytes
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    size = 2048 if known.block_values == 256 or format == "iq4_nl" else 64
    for start in _HALF_OFFSETS[format]:
        scales = (torch.rand(shape[0], 1, generator=generator) + 0.5) / size
        blocks[:, start : start + 2] = scales.half().view(torch.uint8)
    if format == "mxfp4":
        blocks[:, 0] = torch.randint(119, 123, shape[:1], generator=generator, dtype=torch.uint8)
    return blocks.view(rows, -1)


def block_quantized_linear_cases(op: str, dtype: torch.dtype) -> Iterator[OpCall]:
    """Cases of `block_quantized_linear` or `block_quantized_linear_silu_and_mul`."""
    gated = op == "block_quantized_linear_silu_and_mul"
    for rows in ROWS:
        for in_features, parts in _KINDS:
            out_features = sum(size for _, size in parts)
            for int8_activations in (False, True):
                facts = {
                    "in_features": in_features,
                    **({"size": out_features // 2} if gated else {"out_features": out_features}),
                    "bias": rows == 3,
                    "formats": tuple(name for name, _ in parts),
                    "int8_activations": int8_activations,
                }
                yield OpCall(
                    op,
                    facts,
                    lambda rows=rows, k=in_features, o=out_features, parts=parts, int8=int8_activations: (  # type: ignore[misc]
                        rows_of_block_quantized(dtype, rows, k),
                        block_quantized_weight(parts, k, int8),
                        random_tensor(dtype, o, seed=2) if rows == 3 else None,
                    ),
                    weight=1,
                )


def block_quantized_weight(
    parts: tuple[tuple[str, int], ...], in_features: int, int8_activations: bool, seed: int = 0
) -> BlockQuantizedWeight:
    """A random weight with parts of (format, rows)."""
    made = (
        BlockQuantizedPart(name, random_blocks(name, rows, in_features, seed=i))
        for i, (name, rows) in enumerate(parts, seed)
    )
    return BlockQuantizedWeight(tuple(made), in_features, int8_activations)


def rows_of_block_quantized(dtype: torch.dtype, rows: int, size: int) -> torch.Tensor:
    """Inputs whose rounding to int8 has one correct result, independent of how the scales are computed.

    The largest magnitude of each group of inputs is 127 times a power of two, and no value is near the middle between
    two multiples of that power.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-31, 32, (rows, size), generator=generator)
    parts = torch.randint(-1, 2, (rows, size), generator=generator) * 0.25
    x = whole + parts
    x[:, 3::INPUT_BLOCK] = 127.0 * (1 - 2 * (torch.arange(rows)[:, None] % 2))
    return (x * 2.0 ** (torch.arange(rows)[:, None] % 5 - 10)).to(dtype)


def exact_block_quantized(
    x: torch.Tensor, weight: BlockQuantizedWeight, bias: torch.Tensor | None, *, rounds: bool | None = None
) -> torch.Tensor:
    """The exact result, in float64. `rounds`: inputs are rounded; by default as the operation does with their dtype."""
    inputs = x.double()
    if weight.int8_activations and x.dtype != torch.float32 if rounds is None else rounds:
        runs = inputs.view(len(x), -1, INPUT_BLOCK)
        scales = runs.abs().amax(dim=-1, keepdim=True) / 127
        inputs = ((runs / scales.where(scales > 0, 1.0)).round() * scales).view(inputs.shape)
    product = inputs @ weight.dequantize().double().T
    return product if bias is None else product + bias.double()
