"""Assigns attention layers to KV cache groups: which layers share a block table, and which share memory.

Layers are grouped by attention window. A block belongs to one group at a time, so the n-th layers of all groups share a
cache. Layers of one window are divided among the groups of that window in turn.

    layers    0 window 9   1 full   2 window 9
    groups    None: [1]    9: [0]   9: [2]          all three in one cache, in different blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mvllm.platform.tensor_caches import tensors_of

if TYPE_CHECKING:
    import torch

    from mvllm.layers.attention import Attention


def layer_windows(layers: Sequence[Attention], device: torch.device) -> tuple[int | None, ...]:
    """Attention window of each layer in tokens, or None; the widest for all if some layers cannot share a cache."""
    windows = [layer.spec.sliding_window for layer in layers]
    if len(set(windows)) > 1 and not _have_equal_cache_layouts(layers, device):
        windows = [None if None in windows else max(w for w in windows if w is not None)] * len(layers)
    return tuple(windows)


def reported_windows(
    layers: Sequence[Attention], windows: Sequence[int | None], device: torch.device, num_stages: int
) -> tuple[int | None, ...]:
    """The windows that a worker reports; empty, which means one group, if several groups would be wrong.

    With pipeline stages, layers of one window may be assigned to several groups because of other stages' layers, and
    would then share caches. Without other stages they do not, see `layer_windows`.

    Args:
        windows: From `layer_windows`.
    """
    return tuple(windows) if num_stages == 1 or _have_equal_cache_layouts(layers, device) else ()


def assign_layers_to_groups(
    windows: Sequence[int | None], groups: Sequence[int | None], max_model_len: int
) -> list[tuple[int, int]]:
    """The group of each layer, and its index in the group. Layers with equal indices share a cache.

    Args:
        windows: Attention window of each layer.
        groups: Attention window of each group.
        max_model_len: Longest sequence; a window of this size or more is full attention.
    """
    if len(groups) == 1:
        return [(0, i) for i in range(len(windows))]
    places = []
    seen: Counter[int | None] = Counter()
    for window in windows:
        kind = window if window is not None and window < max_model_len else None
        candidates = [group for group, of_group in enumerate(groups) if of_group == kind]
        places.append((candidates[seen[kind] % len(candidates)], seen[kind] // len(candidates)))
        seen[kind] += 1
    return places


def _have_equal_cache_layouts(layers: Sequence[Attention], device: torch.device) -> bool:
    """Whether the layers differ in what they mask alone, and their backends allocate equal caches."""

    def stored(layer: Attention) -> tuple[object, ...]:
        layout = layer.backend.kv_layout()
        cache = layer.backend.allocate(2, layout.block_sizes[0], device)
        parts = tensors_of(cache)
        # An opaque cache cannot be compared: it equals no other.
        stored = object() if parts is None else [(part.shape, part.stride(), part.dtype) for part in parts]
        spec = replace(layer.spec, sliding_window=None, non_causal_spans=False)
        return type(layer.backend), spec, layout, type(cache), stored

    first, *others = (stored(layer) for layer in {layer.spec: layer for layer in layers}.values())
    return all(other == first for other in others)
