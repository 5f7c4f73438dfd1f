"""Mixture-of-experts layers with quantized weights: two grouped products over tokens sorted by expert.

Weights stay packed, and programs widen them in registers. The number of launches and their grids depend on shapes only;
the host reads no tensor.

With few tokens an expert has few rows, and a product reads each weight once: its time is that of reading packed bytes.
Its inner dimension is split among programs if there are fewer than the device executes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mvllm_triton import moe
from mvllm_triton.device import has_ptx, multiplies_from_registers, processors
from mvllm_triton.dtypes import TRITON_DTYPES
from mvllm_triton.float8 import BIAS
from mvllm_triton.float8_linear import scaled_fp8_quant
from mvllm_triton.kernels import quantized_moe as kernels
from mvllm_triton.packed_experts import (
    FLOAT8,
    INT4,
    MXFP4,
    MXFP4_GROUP,
    FloatExperts,
    IntegerExperts,
    Mxfp4Experts,
    PackedExperts,
)
from mvllm_triton.quantized_linear import scaled_int8_quant
from mvllm_triton.tiles import InnerSplits, ProductTiles, inner_splits, most_splits, packed_expert_tiles, power_of_two


def refusals(in_features: int, formats: Sequence[str]) -> list[str]:
    """Reasons why a weight of quantized blocks cannot be packed; empty if it can.

    Args:
        in_features: Its columns.
        formats: The formats of its rows.
    """
    others = sorted(set(formats) - {"mxfp4"})
    reasons = [f"experts of quantized blocks have the format mxfp4, not {name}" for name in others]
    if in_features % MXFP4_GROUP:
        reasons.append(f"{in_features} columns are no multiple of the {MXFP4_GROUP} of a block of mxfp4")
    return reasons


def pack(
    weights: tuple[Sequence[Any], Sequence[Any]],
    float8: torch.dtype = torch.float8_e4m3fn,
    *,
    native: bool = True,
) -> tuple[PackedExperts, PackedExperts]:
    """gate_up and down in the kernels' layout. Accesses each item once, in order, and keeps none.

    Args:
        weights: For each of the two matrices the weights of all experts: `IntegerWeight`, `Float8Weight`, or
            `BlockWeight` of the format mxfp4.
        float8: Format of 8-bit floats, as for `float8_weight.pack`.
        native: Whether the device multiplies that format.
    """
    gate_up, down = weights
    return _packed(gate_up, float8, native), _packed(down, float8, native)


def _packed(weights: Sequence[Any], float8: torch.dtype, native: bool) -> PackedExperts:
    packer: Mxfp4Experts | IntegerExperts | FloatExperts | None = None
    for expert in range(len(weights)):
        weight = weights[expert]
        if packer is None:
            if hasattr(weight, "codes"):
                packer = FloatExperts(weight, len(weights), float8, native)
            elif hasattr(weight, "values"):
                packer = IntegerExperts(weight, len(weights))
            else:
                packer = Mxfp4Experts(weight, len(weights))
        packer.put(expert, weight)
        del weight  # before the next one is created
    assert packer is not None, "a layer has experts"
    return packer.packed()


def quantized_moe(
    x: torch.Tensor,
    gate_up: PackedExperts,
    gate_up_bias: torch.Tensor | None,
    down: PackedExperts,
    down_bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float | None,
    limit: float | None,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of the experts that it is routed to.

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: Packed weights [2 * intermediate_size, hidden_size], gate rows first.
        gate_up_bias: [num_experts, 2 * intermediate_size] or None.
        down: Packed weights [hidden_size, intermediate_size].
        down_bias: [num_experts, hidden_size] or None.
        expert_ids: [T, top_k], int32 or int64.
        expert_weights: [T, top_k], float32.
        alpha, limit: As for `moe.clamped_moe`; None for gates with silu.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    num_tokens, hidden_size = x.shape
    num_experts, top_k = gate_up.num_experts, expert_ids.shape[1]
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    num_entries, inner_size = num_tokens * top_k, gate_up.out_features // 2
    sizes = num_entries, num_experts, x.element_size()
    bits = _unpacked_bits(gate_up, x)
    tiles = packed_expert_tiles(*sizes, gated=True, narrow=gate_up.kind == MXFP4, unpacked_bits=bits)
    max_tiles = min(num_entries, num_entries // tiles.rows + num_experts)
    order = moe.moe_align_block_size(expert_ids.contiguous(), num_experts, max_tiles, tiles)
    gate = 0.0 if alpha is None else alpha, 0.0 if limit is None else limit
    clamped = alpha is not None

    splits = _splits(gate_up, tiles, max_tiles, inner_size, x.device)
    inner = torch.empty((num_entries, inner_size), dtype=x.dtype, device=x.device)
    shape = splits.num, num_entries, 2 * inner_size
    parts = torch.empty(shape, dtype=torch.float32, device=x.device) if splits.num > 1 else inner
    _multiply(parts, x, gate_up, gate_up_bias, order, num_entries, top_k, tiles, splits, gate, clamped)
    if splits.num > 1:
        block = min(1024, power_of_two(inner_size))
        kernels.splitk_reduce_act_and_mul[(num_entries, -(-inner_size // block))](
            inner, parts, num_entries, *gate,
            OUT=inner_size,
            CLAMPED=clamped,
            SPLITS=splits.num,
            BLOCK=block,
            num_warps=4,
        )  # fmt: skip

    bits = _unpacked_bits(down, x)
    tiles = packed_expert_tiles(*sizes, gated=False, narrow=down.kind == MXFP4, unpacked_bits=bits)
    splits = _splits(down, tiles, max_tiles, hidden_size, x.device)
    dtype = torch.float32 if splits.num > 1 else x.dtype
    parts = torch.empty((splits.num, num_entries, hidden_size), dtype=dtype, device=x.device)
    _multiply(parts, inner, down, down_bias, order, num_entries, None, tiles, splits, gate, clamped)
    block = min(1024, power_of_two(hidden_size))
    kernels.splitk_reduce_moe_sum[(num_tokens, -(-hidden_size // block))](
        out, parts, expert_weights.float().contiguous(), num_entries,
        SIZE=hidden_size,
        TOP_K=top_k,
        SPLITS=splits.num,
        BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _unpacked_bits(weight: PackedExperts, x: torch.Tensor) -> int:
    """Bits of int4 or float8 weights that are widened and multiplied from registers; 0 for others."""
    if not multiplies_from_registers(x.device):
        return 0
    if weight.kind == FLOAT8:
        return 0 if weight.rounded and weight.native else 8
    return 4 if weight.kind == INT4 else 0


def _splits(
    weight: PackedExperts, tiles: ProductTiles, max_tiles: int, out_features: int, device: torch.device
) -> InnerSplits:
    num_programs = max_tiles * -(-out_features // tiles.columns)
    bytes_per_expert = weight.data[0].nbytes
    most = most_splits(tiles.rows, weight.out_features, bytes_per_expert) if tiles.rows <= 16 else 1
    return inner_splits(num_programs, weight.in_features, weight.inner, processors(device), most=most)


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: PackedExperts,
    bias: torch.Tensor | None,
    order: tuple[torch.Tensor, torch.Tensor],
    num_entries: int,
    top_k: int | None,
    tiles: ProductTiles,
    splits: InnerSplits,
    gate: tuple[float, float],
    clamped: bool,
) -> None:
    """Launches a grouped product; with `top_k` that of gate and up."""
    gated, compute = top_k is not None, TRITON_DTYPES[x.dtype]
    size = weight.out_features // (2 if gated else 1)
    columns = tiles.columns
    rows = x if x.stride(1) == 1 else x.contiguous()
    data, fp8, row_scales = weight.data, 0, weight.scales
    scale_strides = 0, 0
    if weight.kind == FLOAT8:
        native = weight.native and x.element_size() == 2
        if weight.rounded:
            many = weight.group_size < weight.in_features and weight.input_scale is None
            group = weight.group_size if many else None
            rows, row_scales = scaled_fp8_quant(rows, group, data.dtype, weight.input_scale)
            scale_strides = row_scales.stride(0), row_scales.stride(1) if many else 0
        if not native:
            fp8, data = BIAS[data.dtype], data.view(torch.uint8)
            rows = rows.view(torch.uint8) if weight.rounded else rows
    elif weight.rounded:
        rows, row_scales = scaled_int8_quant(rows)
        scale_strides = 1, 0
    order_, experts = order
    row_bytes = data.shape[2]
    kernels.fused_moe_quantized[(len(experts), -(-size // columns), splits.num)](
        out, rows, row_scales, data, weight.scales, data if weight.zero_points is None else weight.zero_points,
        x if bias is None else bias.contiguous(), order_, experts, num_entries, rows.stride(0), *scale_strides, *gate,
        KIND=weight.kind,
        IN=weight.in_features,
        IN_PAD=2 * row_bytes if weight.kind <= INT4 else row_bytes,
        OUT=size,
        GROUP_SIZE=weight.group_size,
        GROUP_ROWS=weight.group_rows,
        TOP_K=top_k or 1,
        GATED=gated,
        CLAMPED=clamped,
        BIAS=bias is not None,
        ZEROS=weight.zero_points is not None,
        ROUNDED=weight.rounded,
        FP8=fp8,
        COMPUTE=compute,
        PTX=has_ptx(x.device, x.dtype),
        SPLITS=splits.num,
        CHUNK=splits.size,
        BLOCK_M=tiles.rows,
        BLOCK_N=columns,
        BLOCK_K=weight.inner,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
