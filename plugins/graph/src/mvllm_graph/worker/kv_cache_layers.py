"""KV caches and sequence states that a graph program allocates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mvllm.extension_api.worker import (
    CacheError,
    CopiedRows,
    KVCacheLayers,
    StateLayers,
    check_attention_capabilities,
    out_of_memory_as,
)
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    CacheValue,
    DeviceRuntime,
    EngineConfig,
    GraphProgram,
    Platform,
    StateBackend,
    StateSpec,
    StateValue,
    Value,
)
from mvllm_graph.recorded_calls import RecordedAttention

if TYPE_CHECKING:
    from mvllm_graph.worker.graph_model import GraphModel


class GraphKVCacheLayers(KVCacheLayers):
    """All layers share one KV cache group, and their caches and states belong to the program.

    Attributes:
        programs: The program of the loaded model, and that of its draft model; empty while no model is loaded.
        kept_values: The caches and states of each program.
    """

    states: GraphStateLayers

    def __init__(self, config: EngineConfig, platform: Platform, runtime: DeviceRuntime) -> None:
        super().__init__(config, platform, runtime)
        self.programs: list[GraphProgram] = []
        self.kept_values: list[Sequence[Value]] = []
        self.states = GraphStateLayers(platform, runtime, self)
        self._has_caches = False

    def set_programs(self, models: Sequence[GraphModel]) -> None:
        """Sets the programs of the loaded model and, if there is one, its draft model."""
        self.programs = [model.program for model in models]
        self.kept_values = [model.kept_values for model in models]

    def make_backend(self, spec: AttentionSpec) -> AttentionBackend:
        check_attention_capabilities(self._platform, spec)
        return RecordedAttention(spec)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        if self._config.model.kind.is_encoder:  # whose programs have no caches
            self._has_caches = True
            return
        what = f"The KV cache of {num_blocks} blocks of {block_size} tokens"
        with out_of_memory_as(CacheError, what, "Lower memory_utilization or kv_cache_memory_bytes."):
            assert self.programs, "the model is not loaded"
            for program in self.programs:
                program.allocate_caches(num_blocks, block_size)
        self._has_caches = True

    @property
    def has_missing_caches(self) -> bool:
        return not self._has_caches or self.states.has_missing_states

    def free_caches(self) -> None:
        for program in self.programs:
            program.free_caches()
        self._has_caches = False
        self.states.free()

    def clear(self) -> None:
        super().clear()
        self.programs, self.kept_values = [], []

    def copied_blocks(self, block_size: int) -> list[CopiedRows]:
        return [
            CopiedRows(
                block_size * program.kv_layout(value).bytes_per_token,
                partial(program.block_format, value),
                partial(program.export_blocks, value),
                partial(program.import_blocks, value),
            )
            for program, values in zip(self.programs, self.kept_values, strict=True)
            for value in values
            if isinstance(value, CacheValue)
        ]

    def copied_slots(self) -> list[CopiedRows]:
        return [
            CopiedRows(
                StateSpec((value.tensor,)).bytes_per_sequence,
                partial(str, value.tensor),
                partial(program.export_slots, value),
                partial(program.import_slots, value),
            )
            for program, values in zip(self.programs, self.kept_values, strict=True)
            for value in values
            if isinstance(value, StateValue)
        ]

    def _windows_of_layers(self) -> tuple[int | None, ...]:
        return (None,) * len(self._layers)

    def _windows_to_report(self) -> tuple[int | None, ...]:
        return ()

    def _check_chunks(self) -> None:
        """Tracing refuses them."""


class GraphStateLayers(StateLayers):
    """Layers with a sequence state whose states the program allocates.

    Args:
        platform, runtime: As in StateLayers.
        layers: Knows the program.
    """

    def __init__(self, platform: Platform, runtime: DeviceRuntime, layers: GraphKVCacheLayers) -> None:
        super().__init__(platform, runtime)
        self._all_layers = layers
        self._has_states = False

    def make_backend(self, spec: StateSpec) -> StateBackend:
        super().make_backend(spec)  # checks that the platform supports states
        return StateBackend(spec)

    def allocate(self, num_slots: int, *, for_drafts: bool = True) -> None:
        self.num_slots = num_slots
        if not self.are_needed:
            return
        what = f"The states of {num_slots} sequences"
        counts = num_slots, num_slots + self._max_rows * for_drafts
        layers = self._layers, self._draft_layers
        with out_of_memory_as(CacheError, what, "Lower max_num_seqs, memory_utilization or kv_cache_memory_bytes."):
            for program, count, of_program in zip(self._all_layers.programs, counts, layers, strict=False):
                if of_program:
                    program.allocate_states(count)
        self._has_states = True

    @property
    def has_missing_states(self) -> bool:
        return self.are_needed and not self._has_states

    def free(self) -> None:
        self._has_states = False
