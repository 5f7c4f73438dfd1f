"""The operations `add_lora` and `add_lora_by_slot`: they add the results of LoRA adapters to a linear layer's output.

They compute the same and differ in where the adapters of a step are known: on the host, as segments of tokens, or on
the device, as one number per token. The second form needs no numbers of the host, so it runs in a few launches for any
adapters, and a captured step serves every mixture of them.
"""

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


def add_lora_by_slot(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    slots: torch.Tensor,
    bands: tuple[tuple[int, int, int], ...],
) -> torch.Tensor:
    """Adds B · (A · x) to y like `add_lora`, with the adapters of the tokens on the device.

    Layers call it instead of `add_lora` if a provider other than this reference implements it.

    Args:
        y: [T, out_features], compute dtype: the layer's output without adapters.
        x: [T, in_features], compute dtype.
        down: LoRA A, [slots, blocks, rank, in_features], compute dtype; adapters of a lower rank are padded with zeros.
        up: LoRA B, [slots, out_features, rank], compute dtype, padded likewise; includes the adapter's scale.
        slots: [T], int32: each token's slot; -1 for a token without an adapter.
        bands: Output slices (start, stop, block): columns y[:, start:stop] use the results of that block of `down`.
            They cover all columns, in order, and are the same in every call for a layer.

    Returns:
        [T, out_features], compute dtype. Rows without an adapter are those of y. The host reads no tensor.
    """
    num_slots, num_blocks, rank = down.shape[:3]
    for slot in range(num_slots):
        is_own = (slots == slot).unsqueeze(1)
        shrunk = F.linear(torch.where(is_own, x, 0), down[slot].view(num_blocks * rank, -1))
        added = [
            F.linear(shrunk[:, block * rank : (block + 1) * rank], up[slot, start:stop]) for start, stop, block in bands
        ]
        y = y + torch.cat(added, dim=-1)
    return y


_FACTS = {
    "in_features": "columns of the layer's weight on this rank",
    "out_features": "rows of the layer's weight on this rank",
    "rank": "the largest rank of an adapter",
    "blocks": "checkpoint matrices of the layer, each with its own `down`",
}

ADD_LORA = OpSchema(add_lora, facts=_FACTS, may_overwrite=("y",))

ADD_LORA_BY_SLOT = OpSchema(add_lora_by_slot, facts=_FACTS, may_overwrite=("y",), replaces_others=True)
