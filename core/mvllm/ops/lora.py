"""The operation `add_lora`: adds the results of several LoRA adapters to a linear layer's output."""

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
    """Adds B · (A · x) to y, with the matrices of each token's adapter. A is `down`, B is `up`.

        x ── down [rank, in] ──> shrunk ── up [out, rank] ──> added to y

    Args:
        y: [T, out_features], compute dtype: the layer's output without adapters.
        x: [T, in_features], compute dtype.
        down: LoRA A, [slots, blocks, rank, in_features], compute dtype; adapters of a lower rank are padded with zeros.
        up: LoRA B, [slots, out_features, rank], compute dtype, padded likewise; includes the adapter's scale.
        tokens: [n], int64: indices of the tokens that have an adapter, grouped by adapter. None: all tokens, in order.
        segments: (slot, start, stop): tokens[start:stop] have the adapter of that slot. At least one.
        bands: Output slices (start, stop, block): columns y[:, start:stop] use the results of that block of `down`.

    Returns:
        [T, out_features], compute dtype.
    """
    num_blocks, rank = down.shape[1:3]
    for slot, begin, end in segments:
        token_indices = None if tokens is None else tokens[begin:end]
        rows = x[begin:end] if token_indices is None else x.index_select(0, token_indices)
        shrunk = F.linear(rows, down[slot].view(num_blocks * rank, -1))
        for start, stop, block in bands:
            added = F.linear(shrunk[:, block * rank : (block + 1) * rank], up[slot, start:stop])
            if token_indices is None:
                y[begin:end, start:stop] += added
            else:
                y[:, start:stop].index_add_(0, token_indices, added)
    return y


ADD_LORA = OpSchema(
    add_lora,
    facts={
        "in_features": "columns of the layer's weight on this rank",
        "out_features": "rows of the layer's weight on this rank",
        "rank": "the largest rank of an adapter",
        "blocks": "checkpoint matrices of the layer, each with its own `down`",
    },
    may_overwrite=("y",),
)
