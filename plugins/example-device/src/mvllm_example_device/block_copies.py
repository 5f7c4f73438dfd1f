"""Copies of KV blocks and states to the host that end in `wait` and not before, as copies to page-locked memory do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mvllm.plugin_api as api
from mvllm_example_device.strict import Strict

if TYPE_CHECKING:
    import numpy as np


class LateExport(Strict):
    """A copy to the host. `out` has other contents until `wait`, which may come in any order with other copies.

    Args:
        out: uint8 [n, bytes], core's array.
        found: The same shape; what the copy has read from the device.
    """

    def __init__(self, out: np.ndarray, found: np.ndarray) -> None:
        self._out, self._found = out, found
        out[:] = 0xFF

    def wait(self) -> None:
        """Fills core's array."""
        self._out[:] = self._found


class LateBlocks(api.AttentionBackend):
    """The method of an attention backend that exports blocks."""

    def export_blocks(self, kv: api.KVCache, blocks: np.ndarray, out: np.ndarray) -> api.BlockTransfer | None:
        found = out.copy()
        super().export_blocks(kv, blocks, found)
        return LateExport(out, found)


class LateStates(Strict, api.StateBackend):
    """Core's state backend with late exports."""

    def export_slots(self, state: api.State, slots: np.ndarray, out: np.ndarray) -> api.BlockTransfer | None:
        found = out.copy()
        super().export_slots(state, slots, found)
        return LateExport(out, found)
