"""The layers of a rank that have a sequence state: their backends and the states of all slots.

The layers of a draft model have more slots than those of the served model, one for each row: a draft model goes on
behind the tokens of a step to propose draft tokens, and keeps the states of that there.

    slot                  0 ... num_slots - 1 | num_slots ... num_slots + max_rows - 1 | scratch memory
    served model          x ... x               -                                        x
    draft model           x ... x               x ... x                                  x
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mvllm.errors import CacheError
from mvllm.platform.checked_calls import checked_state_backend
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.state import StateBackend, StateSpec
from mvllm.worker.host_blocks import CopiedRows
from mvllm.worker.out_of_memory import out_of_memory_as

if TYPE_CHECKING:
    from mvllm.layers.state import SequenceState


class StateLayers:
    """All layers with a sequence state on a rank.

    Args:
        platform: Gives state backends.
        runtime: The bound device.

    Attributes:
        num_slots: Slots as last allocated, without those of a draft model alone.
    """

    def __init__(self, platform: Platform, runtime: DeviceRuntime) -> None:
        self._platform = platform
        self._runtime = runtime
        self._backends: dict[StateSpec, StateBackend] = {}
        self._layers: list[SequenceState] = []
        self._draft_layers: list[SequenceState] = []
        self._max_rows = 0
        self.num_slots = 0

    def backend_for(self, spec: StateSpec) -> StateBackend:
        """The backend of layers with this spec. Equal specs share one."""
        if spec not in self._backends:
            self._backends[spec] = self.make_backend(spec)
        return self._backends[spec]

    def make_backend(self, spec: StateSpec) -> StateBackend:
        """A new backend for layers with this spec."""
        return checked_state_backend(self._platform, spec)

    def set_layers(
        self, layers: Iterable[SequenceState], draft_layers: Iterable[SequenceState] = (), *, max_rows: int = 0
    ) -> None:
        """Replaces the layers.

        Args:
            layers: Those of the served model.
            draft_layers: Those of a draft model.
            max_rows: Most running requests.
        """
        self._layers, self._draft_layers, self._max_rows = list(layers), list(draft_layers), max_rows

    def clear(self) -> None:
        """Drops the layers and their states."""
        self.free()
        self._layers, self._draft_layers = [], []

    @property
    def are_needed(self) -> bool:
        """Whether a layer has a state."""
        return bool(self._layers or self._draft_layers)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; 0 without layers."""
        return _bytes_of(self._layers) + _bytes_of(self._draft_layers)

    @property
    def fixed_bytes(self) -> int:
        """Bytes beside the slots: scratch memory, and the slots of a draft model alone."""
        return self.bytes_per_slot + self._max_rows * _bytes_of(self._draft_layers)

    def allocate(self, num_slots: int, *, for_drafts: bool = True) -> None:
        """Allocates the states of every layer: zeros.

        Args:
            num_slots: Slots of all layers.
            for_drafts: Allocate the slots of a draft model alone, too.

        Raises:
            CacheError: There is not enough memory. No layer has a state then.
        """
        self.num_slots = num_slots
        num_draft_slots = num_slots + self._max_rows * for_drafts
        what = f"The states of {num_slots} sequences"
        try:
            with out_of_memory_as(CacheError, what, "Lower max_num_seqs, memory_utilization or kv_cache_memory_bytes."):
                for layers, count in ((self._layers, num_slots), (self._draft_layers, num_draft_slots)):
                    for layer in layers:
                        layer.state = layer.backend.allocate(count, self._runtime.device)
        except BaseException:
            self.free()
            raise

    def copied_slots(self) -> list[CopiedRows]:
        """Each layer's part of a host block of states."""
        return [_copied_slots_of(layer) for layer in (*self._layers, *self._draft_layers)]

    @property
    def has_missing_states(self) -> bool:
        """Whether a layer has no states."""
        return any(not layer.state for layer in (*self._layers, *self._draft_layers))

    @property
    def states(self) -> list[object]:
        """The states of all layers that have some now."""
        return [layer.state for layer in (*self._layers, *self._draft_layers)]

    def free(self) -> None:
        """Frees all states."""
        for layer in (*self._layers, *self._draft_layers):
            layer.state = ()


def step_backend_of(layers: Sequence[SequenceState]) -> StateBackend | None:
    """The backend that builds the metadata of a step of a model with these layers; None if it has none."""
    return layers[0].backend if layers else None


def _bytes_of(layers: Iterable[SequenceState]) -> int:
    return sum(layer.backend.bytes_per_sequence() for layer in layers)


def _copied_slots_of(layer: SequenceState) -> CopiedRows:
    backend = layer.backend
    return CopiedRows(
        backend.spec.bytes_per_sequence,
        backend.slot_format,
        lambda slots, out: backend.export_slots(layer.state, slots, out),
        lambda slots, data: backend.import_slots(layer.state, slots, data),
    )
