"""Copies of KV blocks and states to page-locked host memory and back, which the host does not wait for.

    compute stream   ... | blocks gathered in one tensor | step ...        | blocks scattered | step ...
    copy stream                                          | to the host     |
    host             submits                               `wait`, then into core's array

A gathered tensor is a copy, so the step may overwrite its blocks at once. Copies to the device are on the compute
stream, since the step reads the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import AttentionBackend, BlockTransfer, KVCache, State, StateBackend

_copy_streams: dict[torch.device, Any] = {}


class PinnedCopy:
    """A copy to page-locked memory on its way to core's array.

    Args:
        pinned: Its destination: uint8 [n, bytes].
        done: Event recorded after it.
        out: Core's array.
    """

    def __init__(self, pinned: torch.Tensor, done: Any, out: np.ndarray) -> None:
        self._pinned, self._done, self._out = pinned, done, out

    def wait(self) -> None:
        """Waits for the copy and fills core's array."""
        self._done.synchronize()
        self._out[:] = self._pinned.numpy()


def export_rows(tensors: Sequence[torch.Tensor], rows: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
    """Submits a copy of `tensor[rows[i]]` of each tensor, one after the other, as bytes to `out[i]`.

    Args:
        tensors: [rows, ...] each, on one device.
        rows: Host, int64 [n].
        out: Host, uint8 [n, bytes of a row of all tensors].
    """
    device = tensors[0].device
    index = torch.from_numpy(rows).to(device, non_blocking=True)
    parts = [tensor.index_select(0, index) for tensor in tensors]
    gathered = torch.cat([part.view(len(rows), -1).view(torch.uint8) for part in parts], dim=1)
    if device.type == "cpu":
        out[:] = gathered.numpy()
        return None
    api = torch.get_device_module(device)
    if device not in _copy_streams:
        _copy_streams[device] = api.Stream(device)
    stream = _copy_streams[device]
    pinned, done = torch.empty(out.shape, dtype=torch.uint8, pin_memory=True), api.Event()
    stream.wait_stream(api.current_stream(device))
    with api.stream(stream):
        pinned.copy_(gathered, non_blocking=True)
        done.record()
    gathered.record_stream(stream)  # its memory is not used again before the copy
    return PinnedCopy(pinned, done, out)


def import_rows(tensors: Sequence[torch.Tensor], rows: np.ndarray, data: np.ndarray) -> None:
    """Submits copies of the bytes `data[i]` to `tensor[rows[i]]` of each tensor; `data` is not read any more."""
    device = tensors[0].device
    index = torch.from_numpy(rows).to(device, non_blocking=True)
    pinned = torch.empty(data.shape, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pinned.numpy()[:] = data
    gathered, start = pinned.to(device, non_blocking=True), 0
    for tensor in tensors:
        size = tensor[:1].numel() * tensor.element_size()
        part = gathered[:, start : start + size].contiguous().view(tensor.dtype)
        tensor.index_copy_(0, index, part.view(len(rows), *tensor.shape[1:]))
        start += size


class PagedBlocks(AttentionBackend):
    """The methods for `kv_transfer` of a backend whose caches are tuples of tensors [num_blocks, block_size, ...]."""

    def block_format(self, kv: KVCache, block_size: int) -> str:
        spec, parts = self.spec, "; ".join(f"{part.dtype}{list(part.shape[1:])}" for part in kv)
        kind = "values in keys" if spec.values_in_keys else "keys and values"
        return f"mvllm_torch_gpu blocks of {block_size} tokens, {kind} in {self.storage_format()}: {parts}"

    def storage_format(self) -> str:
        """The storage dtype by name, with what its name leaves open."""
        return self.spec.kv_dtype

    def export_blocks(self, kv: KVCache, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        return export_rows(kv, blocks, out)

    def import_blocks(self, kv: KVCache, blocks: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        import_rows(kv, blocks, data)
        return None


class CopiedStates(StateBackend):
    """Core's state backend, whose copies the host does not wait for."""

    def export_slots(self, state: State, slots: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        return export_rows(state, slots, out)

    def import_slots(self, state: State, slots: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        import_rows(state, slots, data)
        return None
