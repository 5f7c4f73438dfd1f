"""Which attention layers share a block table, and which share memory.

Layers are grouped by what they see. A block belongs to one group at a time, so layers of different groups can have the
same cache: the n-th layer of each. Those of one kind are dealt out to the groups of that kind in turn.

    layers    0 sees 9   1 sees all   2 sees 9
    groups    None: [1]    9: [0]    9: [2]         all three in one cache, in blocks of their own
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
    """What each layer sees, in tokens, or None; where some could not share a cache, what the widest sees for all."""
    windows = [layer.spec.sliding_window for layer in layers]
    if len(set(windows)) > 1 and not _have_equal_cache_layouts(layers, device):
        windows = [None if None in windows else max(w for w in windows if w is not None)] * len(layers)
    return tuple(windows)


def reported_windows(
    layers: Sequence[Attention], windows: Sequence[int | None], device: torch.device, num_stages: int
) -> tuple[int | None, ...]:
    """What a worker says that its layers see: nothing, so that there is one group, where several would be wrong.

    Layers of one kind may come to lie in several groups, and then share caches, because of what those of other stages
    see. By themselves they do not, see `layer_windows`.

    Args:
        windows: As from `layer_windows`.
    """
    return tuple(windows) if num_stages == 1 or _have_equal_cache_layouts(layers, device) else ()


def assign_layers_to_groups(
    windows: Sequence[int | None], groups: Sequence[int | None], max_model_len: int
) -> list[tuple[int, int]]:
    """For each layer its group and its place in the group: layers of equal places share a cache.

    Args:
        windows: What each layer sees.
        groups: What the layers of each group see.
        max_model_len: Longest sequence; a layer that sees as much sees all.
    """
    if len(groups) == 1:
        return [(0, i) for i in range(len(windows))]
    places = []
    seen: Counter[int | None] = Counter()
    for window in windows:
        kind = window if window is not None and window < max_model_len else None
        own = [group for group, of_group in enumerate(groups) if of_group == kind]
        places.append((own[seen[kind] % len(own)], seen[kind] // len(own)))
        seen[kind] += 1
    return places


def _have_equal_cache_layouts(layers: Sequence[Attention], device: torch.device) -> bool:
    """Whether the layers differ in nothing but what they see, and their backends make caches that are the same."""

    def stored(layer: Attention) -> tuple[object, ...]:
        layout = layer.backend.kv_layout()
        cache = layer.backend.allocate(2, layout.block_sizes[0], device)
        parts = tensors_of(cache)
        # What is in another kind of cache is its backend's own affair: it is like no other.
        stored = object() if parts is None else [(part.shape, part.stride(), part.dtype) for part in parts]
        return type(layer.backend), replace(layer.spec, sliding_window=None), layout, type(cache), stored

    first, *others = (stored(layer) for layer in {layer.spec: layer for layer in layers}.values())
    return all(other == first for other in others)
