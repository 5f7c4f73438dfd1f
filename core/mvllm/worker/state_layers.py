"""The layers of a rank that have a sequence state: their backends and the states of all slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mvllm.errors import CacheError
from mvllm.platform.checked_calls import checked_state_backend
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.state import StateBackend, StateSpec
from mvllm.worker.out_of_memory import out_of_memory_as

if TYPE_CHECKING:
    from mvllm.layers.state import SequenceState


class StateLayers:
    """All layers with a sequence state on a rank.

    Args:
        platform: Gives state backends.
        runtime: The bound device.
    """

    def __init__(self, platform: Platform, runtime: DeviceRuntime) -> None:
        self._platform = platform
        self._runtime = runtime
        self._backends: dict[StateSpec, StateBackend] = {}
        self._layers: list[SequenceState] = []

    def backend_for(self, spec: StateSpec) -> StateBackend:
        """The backend of layers with this spec. Equal specs share one."""
        if spec not in self._backends:
            self._backends[spec] = self.make_backend(spec)
        return self._backends[spec]

    def make_backend(self, spec: StateSpec) -> StateBackend:
        """A new backend for layers with this spec."""
        return checked_state_backend(self._platform, spec)

    def set_layers(self, layers: Iterable[SequenceState]) -> None:
        """Replaces the layers."""
        self._layers = list(layers)

    def clear(self) -> None:
        """Drops the layers and their states."""
        self.free()
        self._layers = []

    @property
    def step_backend(self) -> StateBackend | None:
        """The backend that builds the metadata of a step; None if no layer has a state."""
        return self._layers[0].backend if self._layers else None

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; 0 without layers."""
        return sum(layer.backend.bytes_per_sequence() for layer in self._layers)

    def allocate(self, num_slots: int) -> None:
        """Allocates the states of every layer: zeros.

        Raises:
            CacheError: There is not enough memory. No layer has a state then.
        """
        what = f"The states of {num_slots} sequences"
        try:
            with out_of_memory_as(CacheError, what, "Lower max_num_seqs, memory_utilization or kv_cache_memory_bytes."):
                for layer in self._layers:
                    layer.state = layer.backend.allocate(num_slots, self._runtime.device)
        except BaseException:
            self.free()
            raise

    @property
    def has_missing_states(self) -> bool:
        """Whether a layer has no states."""
        return any(not layer.state for layer in self._layers)

    def free(self) -> None:
        """Frees all states."""
        for layer in self._layers:
            layer.state = ()
