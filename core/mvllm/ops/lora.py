"""What LoRA adapters add to a linear layer, for the tokens of several adapters at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    tokens: torch.Tensor | None,
    segments: tuple[tuple[int, int, int], ...],
    bands: tuple[tuple[int, int, int], ...],
) -> torch.Tensor:
    """y with up · (down · x) added, for each token the matrices of its adapter.

        x ── down [rank, in] ──> shrunk ── up [out, rank] ──> added to y

    Args:
        y: [T, out_features], compute dtype: what the layer itself makes of `x`.
        x: [T, in_features], compute dtype.
        down: [slots, blocks, rank, in_features], compute dtype; an adapter of a lower rank has zeros in the rest.
        up: [slots, out_features, rank], compute dtype, likewise; the adapter's scale is in it.
        tokens: [n], int64: places of the tokens that have an adapter, those of one adapter together. None: all of them,
            in their order.
        segments: (slot, start, stop): tokens[start:stop] have the adapter of that slot. At least one.
        bands: (start, stop, block): columns y[:, start:stop] take what that block of `down` has shrunk.

    Returns:
        [T, out_features], compute dtype.
    """
    num_blocks, rank = down.shape[1:3]
    for slot, begin, end in segments:
        chosen = None if tokens is None else tokens[begin:end]
        rows = x[begin:end] if chosen is None else x.index_select(0, chosen)
        shrunk = F.linear(rows, down[slot].view(num_blocks * rank, -1))
        for start, stop, block in bands:
            added = F.linear(shrunk[:, block * rank : (block + 1) * rank], up[slot, start:stop])
            if chosen is None:
                y[begin:end, start:stop] += added
            else:
                y[:, start:stop].index_add_(0, chosen, added)
    return y


ADD_LORA = OpSchema(
    add_lora,
    facts={
        "in_features": "columns of the layer's weight on this rank",
        "out_features": "rows of the layer's weight on this rank",
        "rank": "the largest rank of an adapter",
        "blocks": "matrices of the checkpoint that the layer is made of, each with a `down` of its own",
    },
    may_overwrite=("y",),
)
