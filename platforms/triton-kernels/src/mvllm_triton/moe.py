"""Mixture-of-experts layers: two grouped products over tokens sorted by expert.

The number of launches and their grids depend on shapes only; the host reads no tensor.
"""

from __future__ import annotations

import torch

from mvllm_triton.kernels import moe as kernels
from mvllm_triton.tiles import ProductTiles, expert_tiles, power_of_two, routed_entries

_SUMMED_EXPERTS, _SUMMED_PIECES = 16, 256
"""Experts of a program that sums counts, 64 bytes of a row, and the pieces that it reads at once."""


def moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of the gated MLPs that it is routed to.

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: [num_experts, 2 * intermediate_size, hidden_size], gate rows first.
        down: [num_experts, hidden_size, intermediate_size].
        expert_ids: [T, top_k], int32 or int64.
        expert_weights: [T, top_k], float32.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    return _experts(x, gate_up, None, down, None, expert_ids, expert_weights, 0.0, 0.0)


def clamped_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of experts with biases and clamped gates.

        gate = min(gate, limit)    up = max(-limit, min(up, limit))    inner = (up + 1) * gate * sigmoid(alpha * gate)

    Args:
        gate_up_bias: [num_experts, 2 * intermediate_size].
        down_bias: [num_experts, hidden_size].
        alpha: Steepness of the sigmoid.
        limit: Upper bound of `gate`, and bound of the magnitude of `up`; > 0.

    The other arguments and the result are those of `moe`.
    """
    return _experts(x, gate_up, gate_up_bias, down, down_bias, expert_ids, expert_weights, alpha, limit)


def _experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    num_tokens, hidden_size = x.shape
    num_experts, _, inner_size = down.shape
    top_k = expert_ids.shape[1]
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    num_entries = num_tokens * top_k
    tiles = expert_tiles(num_entries, num_experts, x.element_size())
    max_tiles = min(num_entries, num_entries // tiles.rows + num_experts)
    order, experts = moe_align_block_size(expert_ids.contiguous(), num_experts, max_tiles, tiles)

    inner = torch.empty((num_entries, inner_size), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_entries, hidden_size), dtype=x.dtype, device=x.device)
    for target, rows, weight, bias, gated in (
        (inner, x, gate_up, gate_up_bias, True),
        (parts, inner, down, down_bias, False),
    ):
        size = target.shape[1]
        columns = min(64, tiles.columns) if gated else tiles.columns  # accumulators of both gate and up
        kernels.fused_moe[(max_tiles, -(-size // columns))](
            target, rows, weight.contiguous(), x if bias is None else bias.contiguous(), order, experts,
            num_entries, max_tiles, rows.stride(0), alpha, limit,
            IN=rows.shape[1],
            OUT=size,
            TOP_K=top_k if gated else 1,
            GATED=gated,
            CLAMPED=gate_up_bias is not None,
            BIAS=bias is not None,
            BLOCK_M=tiles.rows,
            BLOCK_N=columns,
            BLOCK_K=tiles.inner,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
    block = min(1024, power_of_two(hidden_size))
    kernels.moe_sum[(num_tokens, -(-hidden_size // block))](
        out, parts, expert_weights.float().contiguous(), SIZE=hidden_size, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def moe_align_block_size(
    expert_ids: torch.Tensor, num_experts: int, max_tiles: int, tiles: ProductTiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries ordered by expert, and the expert of each tile; see kernels/moe.py."""
    device, num_entries = expert_ids.device, expert_ids.numel()
    experts_pad = power_of_two(num_experts)
    block = routed_entries(experts_pad)
    num_pieces = -(-num_entries // block)
    counts = torch.empty((num_pieces + 1, num_experts), dtype=torch.int32, device=device)
    order = torch.empty(max_tiles * tiles.rows, dtype=torch.int32, device=device)
    experts = torch.empty(max_tiles, dtype=torch.int32, device=device)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS_PAD": experts_pad, "BLOCK": block}
    kernels.moe_align_block_size_count[(num_pieces,)](counts, expert_ids, num_entries, **sizes)
    kernels.moe_align_block_size_scan[(-(-num_experts // _SUMMED_EXPERTS),)](
        counts, num_pieces, NUM_EXPERTS=num_experts, EXPERTS=_SUMMED_EXPERTS, PIECES=_SUMMED_PIECES
    )
    kernels.moe_align_block_size_sort[(num_pieces + num_experts,)](
        order, experts, counts, expert_ids, num_entries, num_pieces, max_tiles,
        BLOCK_M=tiles.rows,
        **sizes,
    )  # fmt: skip
    return order, experts
