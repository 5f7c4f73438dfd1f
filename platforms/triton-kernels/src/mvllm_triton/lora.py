"""LoRA adapters of a batch: two launches per linear layer for any number of adapters.

The launches and their grids depend on shapes only; the host reads no tensor.
"""

from __future__ import annotations

from functools import cache

import torch

from mvllm_triton.device import processors
from mvllm_triton.kernels import lora as kernels
from mvllm_triton.tiles import lora_splits, lora_tiles, power_of_two


def add_lora_by_slot(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    slots: torch.Tensor,
    bands: tuple[tuple[int, int, int], ...],
) -> torch.Tensor:
    """Adds up[slot] · (down[slot] · x) to the rows of `y`, in place.

    Args:
        y: [T, out_features].
        x: [T, in_features].
        down: [slots, blocks, rank, in_features], contiguous.
        up: [slots, out_features, rank], contiguous.
        slots: [T], int32: each token's slot; -1 adds nothing.
        bands: (start, stop, block): columns y[:, start:stop] use the results of that block of `down`. The table that
            the kernel reads is copied to the device at the first call with these bands.

    Returns:
        `y`; a copy if its last dimension is not contiguous.
    """
    y, x = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (y, x))
    num_tokens, out_features = y.shape
    num_slots, num_blocks, rank, in_features = down.shape
    if num_tokens == 0:
        return y
    tiles = lora_tiles(num_tokens, out_features, x.element_size())
    row_tiles = -(-num_tokens // tiles.rows)
    num_splits, split_size = lora_splits(row_tiles * num_blocks, in_features, tiles.inner, processors(x.device))
    shrunk = torch.empty((num_splits, num_tokens, num_blocks * rank), dtype=torch.float32, device=x.device)
    sizes = {
        "NUM_SLOTS": num_slots,
        "BLOCKS": num_blocks,
        "RANK": rank,
        "RANK_PAD": power_of_two(rank, 16),
        "BLOCK_M": tiles.rows,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    kernels.lora_shrink[(row_tiles, num_blocks, num_splits)](
        shrunk, x, down, slots, num_tokens, x.stride(0), split_size, IN=in_features, BLOCK_K=tiles.inner, **sizes
    )
    columns = _column_tiles(bands, tiles.columns, y.device)
    kernels.lora_expand[(row_tiles, columns.shape[0])](
        y, shrunk, up, slots, columns, num_tokens, y.stride(0), num_splits,
        OUT=out_features,
        BLOCK_N=tiles.columns,
        **sizes,
    )  # fmt: skip
    return y


@cache
def _column_tiles(bands: tuple[tuple[int, int, int], ...], size: int, device: torch.device) -> torch.Tensor:
    """[tiles, 3], int32: first column of each tile, end of its band, and the band's block."""
    tiles = [(first, stop, block) for start, stop, block in bands for first in range(start, stop, size)]
    host = torch.tensor(tiles, dtype=torch.int32)
    if device.type in ("cpu", "meta"):
        return host.to(device)
    # Without waiting for the device: the first call may be in a step that is about to be captured.
    return host.pin_memory().to(device, non_blocking=True)
