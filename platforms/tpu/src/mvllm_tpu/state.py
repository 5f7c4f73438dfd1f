"""Memory for sequence states on XLA devices. The operations are core's with static shapes (`static_state_ops`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mvllm.plugin_api import State, StateBackend, StateSpec

RequireRoom = Callable[[int, torch.device, str], None]
"""Raises MemoryError if so many bytes are not free on a device; the text names what takes them."""


class XlaStateBackend(StateBackend):
    """StateBackend that allocates at once, also on lazy devices.

    Args:
        spec: The states of one layer.
        require_room: Checks for free memory before an allocation.
        materialize: Runs recorded operations.
    """

    def __init__(
        self, spec: StateSpec, require_room: RequireRoom, materialize: Callable[[], None] | None = None
    ) -> None:
        super().__init__(spec)
        self._require_room, self._materialize = require_room, materialize

    def allocate(self, num_slots: int, device: torch.device) -> State:
        self._require_room((num_slots + 1) * self.bytes_per_sequence(), device, "The sequence states of a layer")
        try:
            state = super().allocate(num_slots, device)
            if self._materialize is not None:
                self._materialize()
        except RuntimeError as e:  # the text depends on the runtime
            raise MemoryError(f"The states of {num_slots} sequences do not fit: {e}") from e
        return state
