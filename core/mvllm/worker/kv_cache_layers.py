"""The layers of a rank that have a KV cache or sequence states: their backends, groups and cache tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mvllm.attention.chunks import ChunkedMetadataBuilder
from mvllm.config.engine_config import EngineConfig
from mvllm.errors import CacheError, ConfigError
from mvllm.platform.attention import AttentionBackend, AttentionSpec, KVCache
from mvllm.platform.checked_calls import call_checked, checked_attention_backend
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.worker.host_blocks import CopiedRows
from mvllm.worker.kv_cache_groups import assign_layers_to_groups, layer_windows, reported_windows
from mvllm.worker.out_of_memory import out_of_memory_as
from mvllm.worker.state_layers import StateLayers

if TYPE_CHECKING:
    from mvllm.layers.attention import Attention
    from mvllm.layers.state import SequenceState

MetadataBuilder = AttentionBackend | ChunkedMetadataBuilder
AttentionGroups = Mapping[Hashable, tuple[MetadataBuilder, int]]
"""Backend and group of each attention metadata, by the layers' `metadata_key`."""


_BLOCK_SIZES_WITHOUT_ATTENTION = (16, 1, 2, 4, 8, 32, 64, 128, 256, 512, 1024)
"""Blocks of a rank without attention layers only name tokens. Other ranks may have attention backends."""


class KVCacheLayers:
    """All attention layers of a rank, of the served model and of a draft model, and the layers with a sequence state.

    Args:
        config: The engine's configuration.
        platform: Gives attention backends.
        runtime: The bound device.

    Attributes:
        groups: Attention window of each group in tokens, or None for full attention.
        attention_groups: Metadata builders and groups of all attention layers.
        states: The layers with a sequence state.
    """

    def __init__(self, config: EngineConfig, platform: Platform, runtime: DeviceRuntime) -> None:
        self._config = config
        self._platform = platform
        self._runtime = runtime
        self._backends: dict[AttentionSpec, AttentionBackend] = {}
        self._layers: list[Attention] = []
        self._windows: tuple[int | None, ...] = ()
        self._layer_positions: list[tuple[int, int]] = []
        self.groups: list[int | None] = [None]
        self.attention_groups: dict[Hashable, tuple[MetadataBuilder, int]] = {}
        self.states = StateLayers(platform, runtime)

    def backend_for(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend of layers with this spec. Equal specs share one."""
        if spec not in self._backends:
            self._backends[spec] = self.make_backend(spec)
        return self._backends[spec]

    def make_backend(self, spec: AttentionSpec) -> AttentionBackend:
        """A new backend for layers with this spec."""
        return checked_attention_backend(self._platform, spec)

    def set_layers(
        self,
        layers: Iterable[Attention],
        state_layers: Iterable[SequenceState] = (),
        draft_state_layers: Iterable[SequenceState] = (),
    ) -> None:
        """Replaces the layers, and assigns those with attention to the present groups.

        Args:
            layers: Attention layers of all models.
            state_layers, draft_state_layers: Layers with a sequence state of the served model and of a draft model.

        Raises:
            ConfigError: Layers have chunks, and the platform's steps have fixed numbers of requests.
        """
        self._layers = list(layers)
        self.states.set_layers(state_layers, draft_state_layers, max_rows=self._config.scheduler.max_num_seqs)
        self._check_chunks()
        self._windows = self._windows_of_layers()
        self._assign_groups()

    def clear(self) -> None:
        """Drops the layers and their caches."""
        self.free_caches()
        self._layers = []
        self.states.clear()

    def set_groups(self, windows: Sequence[int | None]) -> None:
        """Gives each group of layers its own block table.

        Args:
            windows: Attention window of each group in tokens, or None for full attention.
        """
        self.groups = list(windows)
        self._assign_groups()

    def attention_groups_of(self, layers: Iterable[Attention]) -> AttentionGroups:
        """Backends and groups of some of the layers."""
        keys = {layer.metadata_key for layer in layers}
        return {key: plan for key, plan in self.attention_groups.items() if key in keys}

    def kv_cache_needs(self) -> KVCacheNeeds:
        """Bytes of one token and of one state slot over all layers, and the block sizes that all backends accept.

        Raises:
            CacheError: The backends have no block size in common, or it does not divide the chunks of attention.
        """
        states = self.states
        return replace(self._attention_needs(), state_bytes=states.bytes_per_slot, fixed_state_bytes=states.fixed_bytes)

    def _attention_needs(self) -> KVCacheNeeds:
        """What the attention layers need, see `kv_cache_needs`."""
        if not self._layers:
            if self._config.model.kind.is_encoder:  # one block holds a whole prompt, and takes no memory
                return KVCacheNeeds(0, (self._config.model.max_model_len,))
            return KVCacheNeeds(0, _BLOCK_SIZES_WITHOUT_ATTENTION)
        layouts = [layer.backend.kv_layout() for layer in self._layers]
        chunks = {layer.chunk_size for layer in self._layers if layer.chunk_size is not None}
        common = [
            size
            for size in layouts[0].block_sizes
            if all(size in layout.block_sizes for layout in layouts) and not any(chunk % size for chunk in chunks)
        ]
        if not common:
            offers = "; ".join(sorted({str(layout.block_sizes) for layout in layouts}))
            if chunks:
                raise CacheError(
                    f"The model attends in chunks of {min(chunks)} tokens, and the attention backends accept no block "
                    f"size that divides every chunk: {offers}. Set max_model_len to at most {min(chunks)}, so that "
                    "there is one chunk."
                )
            raise CacheError(f"The attention backends of this model accept no common block size: {offers}.")
        configured = self._config.cache.block_size
        if configured is not None and any(chunk % configured for chunk in chunks):
            raise CacheError(
                f"block_size {configured} was asked for, but the model attends in chunks of {min(chunks)} tokens, "
                "which blocks must divide. Leave block_size out, or set it to one of "
                f"{', '.join(map(str, sorted(common)))}."
            )
        bytes_per_token = sum(layout.bytes_per_token for layout in layouts)
        if self._config.speculative is not None and self._config.speculative.model is not None:
            # A draft model may be a token behind, so it attends to earlier positions than the served model.
            return KVCacheNeeds(bytes_per_token, tuple(common))
        return KVCacheNeeds(bytes_per_token, tuple(common), self._windows_to_report())

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Allocates the KV cache of every layer; layers of different groups share one.

        Raises:
            CacheError: There is not enough memory. No layer has a cache then.
        """
        what = f"The KV cache of {num_blocks} blocks of {block_size} tokens"
        try:
            with out_of_memory_as(CacheError, what, "Lower memory_utilization or kv_cache_memory_bytes."):
                caches: dict[int, KVCache] = {}
                for layer, (_, place) in zip(self._layers, self._layer_positions, strict=True):
                    if place not in caches:
                        caches[place] = layer.backend.allocate(num_blocks, block_size, self._runtime.device)
                    layer.kv_cache = caches[place]
        except BaseException:
            self.free_caches()
            raise

    def copied_blocks(self, block_size: int) -> list[CopiedRows]:
        """As in CopiedLayers: the layers of different groups that share a cache are one part."""
        first: dict[int, Attention] = {}
        for layer, (_, place) in zip(self._layers, self._layer_positions, strict=True):
            first.setdefault(place, layer)
        return [_copied_blocks_of(layer, block_size) for _, layer in sorted(first.items())]

    def copied_slots(self) -> list[CopiedRows]:
        """As in CopiedLayers."""
        return self.states.copied_slots()

    @property
    def has_missing_caches(self) -> bool:
        """Whether a layer has no cache or no states."""
        return self.states.has_missing_states or any(layer.kv_cache is None for layer in self._layers)

    @property
    def caches(self) -> list[object]:
        """The KV caches and states of all layers that have one now."""
        return [layer.kv_cache for layer in self._layers] + self.states.states

    def free_caches(self) -> None:
        """Frees all caches and states."""
        for layer in self._layers:
            layer.kv_cache = None
        self.states.free()

    def _assign_groups(self) -> None:
        """Assigns layers to groups.

        A backend builds one metadata per step, so each block table has its own backend, and so have layers with chunks.
        """
        self.attention_groups = {}
        backends: dict[Hashable, AttentionBackend] = {}
        self._layer_positions = assign_layers_to_groups(self._windows, self.groups, self._config.model.max_model_len)
        for layer, (group, _) in zip(self._layers, self._layer_positions, strict=True):
            chunk = layer.chunk_size
            key: Hashable = layer.spec if chunk is None else (layer.spec, chunk)
            if key in self.attention_groups and self.attention_groups[key][1] != group:
                key = (layer.spec, chunk, group)
            if key not in self.attention_groups:
                is_first = key == layer.spec
                backend = self.backend_for(layer.spec) if is_first else self.make_backend(layer.spec)
                builder = backend if chunk is None else ChunkedMetadataBuilder(backend, chunk)
                backends[key], self.attention_groups[key] = backend, (builder, group)
            layer.metadata_key, layer.backend = key, backends[key]

    def _windows_of_layers(self) -> tuple[int | None, ...]:
        """The window by which each layer is assigned to a group."""
        return layer_windows(self._layers, self._runtime.device)

    def _windows_to_report(self) -> tuple[int | None, ...]:
        """The windows by which the engine makes groups; empty for one group."""
        stages = self._config.parallel.pipeline_parallel_size
        return reported_windows(self._layers, self._windows, self._runtime.device, stages)

    def _check_chunks(self) -> None:
        chunks = [layer.chunk_size for layer in self._layers if layer.chunk_size is not None]
        if not chunks:
            return
        shapes = call_checked(self._platform, "shapes", returns=ShapePolicy)
        captures = self._platform.capabilities.graphs and shapes.capture is not None and not self._config.enforce_eager
        if captures or shapes.requests is not None or shapes.pages is not None:
            raise ConfigError(
                f"The model has chunked attention in chunks of {min(chunks)} tokens, which needs steps with any number "
                f"of requests, but max_model_len is {self._config.model.max_model_len} and the platform's steps have "
                f"fixed sizes. Set max_model_len to at most {min(chunks)}"
                + (", or enforce_eager." if captures and shapes.requests is None else ".")
            )


def _copied_blocks_of(layer: Attention, block_size: int) -> CopiedRows:
    """A layer's part of a host block. Its cache is that of the time of the call: `sleep` frees caches."""
    backend = layer.backend
    return CopiedRows(
        block_size * backend.kv_layout().bytes_per_token,
        lambda: backend.block_format(layer.kv_cache, block_size),
        lambda blocks, out: backend.export_blocks(layer.kv_cache, blocks, out),
        lambda blocks, data: backend.import_blocks(layer.kv_cache, blocks, data),
    )
