"""Layers that may share a KV cache."""

from types import SimpleNamespace
from typing import Any

import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.engine.core.kv_cache_groups import choose_group_windows
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.worker.kv_cache_groups import assign_layers_to_groups, layer_windows, reported_windows

HOST = torch.device("cpu")


class RingLayoutBackend(ReferenceAttention):
    """A backend with another cache layout for layers with a window."""

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Any:
        cache: Any = super().allocate(num_blocks, block_size, device)
        return cache if self.spec.sliding_window is None else cache.transpose(2, 3).contiguous().transpose(2, 3)


def layer(window: int | None, backend: type[ReferenceAttention] = ReferenceAttention, **fields: object) -> Any:
    values: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 1.0, **fields}
    spec = AttentionSpec(dtype="float32", kv_dtype="float32", sliding_window=window, **values)
    return SimpleNamespace(spec=spec, backend=backend(spec))


def test_layers_that_differ_in_the_window_alone_report_their_windows():
    assert layer_windows([layer(9), layer(None), layer(9)], HOST) == (9, None, 9)
    assert layer_windows([layer(9), layer(9, head_size=16)], HOST) == (9, 9)  # a separate cache for each
    # Of images only layers with a window see all (Gemma 4).
    assert layer_windows([layer(9, non_causal_spans=True), layer(None)], HOST) == (9, None)


def test_layers_with_different_cache_layouts_get_the_widest_window():
    assert layer_windows([layer(9), layer(None, head_size=16)], HOST) == (None, None)
    assert layer_windows([layer(9), layer(20, head_size=16)], HOST) == (20, 20)
    assert layer_windows([layer(9, RingLayoutBackend), layer(None, RingLayoutBackend)], HOST) == (None, None)
    assert layer_windows([layer(9), layer(None, RingLayoutBackend)], HOST) == (None, None)


def test_layers_with_different_cache_layouts_share_no_cache_with_pipeline_stages():
    first = [layer(9), layer(None, head_size=16), layer(None, head_size=16), layer(9)]
    stages = [first, [layer(9), layer(None)]]

    def places(num_stages: int) -> list[tuple[int, int]]:
        seen = [layer_windows(stage, HOST) for stage in stages]
        needs = [
            KVCacheNeeds(1200, (16,), reported_windows(stage, windows, HOST, num_stages))
            for stage, windows in zip(stages, seen, strict=True)
        ]
        return assign_layers_to_groups(seen[0], choose_group_windows(needs, 100), 100)

    assert len({place for _, place in places(2)}) == 4
    assert len({place for _, place in places(1)}) < 4  # which is the reason
    assert reported_windows(stages[1], (9, None), HOST, 2) == (9, None)


def test_layers_of_one_window_are_divided_among_its_groups_in_turn():
    assert assign_layers_to_groups([9, None, 9, 9, None], [None, 9, 9], 100) == [(1, 0), (0, 0), (2, 0), (1, 1), (0, 1)]
    assert assign_layers_to_groups([9, 200, 9], [None, 9], 100) == [(1, 0), (0, 0), (1, 1)]
    assert assign_layers_to_groups([9, 9], [9], 100) == [(0, 0), (0, 1)]
