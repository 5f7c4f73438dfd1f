"""Layers with chunked attention get backends, metadata and block sizes of their own, on platforms with free shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mvllm.attention.chunks import ChunkedMetadataBuilder
from mvllm.attention.reference import ReferenceAttention
from mvllm.config.engine_config import replace_field
from mvllm.errors import ConfigError
from mvllm.layers.attention import Attention
from mvllm.layers.linear import HeadShard
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.shapes import CaptureShapes, ShapePolicy
from mvllm.worker.kv_cache_layers import KVCacheLayers
from tests.helpers.paged_driver import make_context
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime
from tests.unit.worker.fake_platform import FakePlatform


class Platform(FakePlatform):
    def __init__(self, shapes: ShapePolicy | None = None, *, graphs: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, graphs=graphs)
        self._shapes = shapes or ShapePolicy()

    def shapes(self) -> ShapePolicy:
        return self._shapes

    def attention_backend(self, spec: AttentionSpec) -> ReferenceAttention:
        return ReferenceAttention(spec)


def layers_of(*chunks: int | None) -> list[Attention]:
    return [Attention(make_context(), HeadShard(2, 1, 0, 0), 4, 0.5, chunk_size=chunk) for chunk in chunks]


def manager(platform: Platform, **settings: Any) -> KVCacheLayers:
    config = make_config()
    for name, value in settings.items():
        config = replace_field(config, name, value)
    return KVCacheLayers(config, platform, HostRuntime())


def test_each_chunk_size_has_a_backend_and_metadata_of_its_own() -> None:
    found, layers = manager(Platform()), layers_of(32, None, 32, 48)
    found.set_layers(layers)
    assert layers[0].backend is layers[2].backend and len({layer.backend for layer in layers}) == 3
    builders = [found.attention_groups[layer.metadata_key][0] for layer in layers]
    assert builders[1] is layers[1].backend
    for number in (0, 2, 3):
        builder = builders[number]
        assert isinstance(builder, ChunkedMetadataBuilder)
        assert builder.backend is layers[number].backend and builder.chunk_size == layers[number].chunk_size


def test_blocks_fill_chunks() -> None:
    found = manager(Platform())
    found.set_layers(layers_of(48, None))
    assert set(found.kv_cache_needs().block_sizes) == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (Platform(ShapePolicy(requests=(8, 16))), r"fixed sizes\. Set max_model_len to at most 32\."),
        (Platform(ShapePolicy(pages=(8, 16))), r"Set max_model_len to at most 32\."),
        (Platform(ShapePolicy(capture=CaptureShapes(decode=(1, 2))), graphs=True), "at most 32, or enforce_eager"),
    ],
    ids=["requests", "pages", "graphs"],
)
def test_platforms_with_fixed_numbers_of_requests_are_refused(platform: Platform, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        manager(platform).set_layers(layers_of(32, None))
    manager(platform).set_layers(layers_of(None))
    if platform.capabilities.graphs:
        manager(platform, enforce_eager=True).set_layers(layers_of(32, None))
