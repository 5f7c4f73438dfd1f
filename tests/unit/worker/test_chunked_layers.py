"""Layers with chunked attention get backends, metadata and block sizes of their own, on platforms with free shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mvllm.attention.chunks import ChunkedMetadataBuilder
from mvllm.attention.reference import ReferenceAttention
from mvllm.config.engine_config import replace_field
from mvllm.errors import CacheError, ConfigError
from mvllm.layers.attention import Attention
from mvllm.layers.linear import HeadShard
from mvllm.platform.attention import AttentionSpec, KVLayout
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


def test_a_given_block_size_that_does_not_divide_the_chunks_is_refused_with_those_that_do() -> None:
    found = manager(Platform(), **{"cache.block_size": 16})
    found.set_layers(layers_of(48, None))
    assert 16 in found.kv_cache_needs().block_sizes
    found.set_layers(layers_of(20, None))
    with pytest.raises(CacheError, match=r"block_size 16 .* chunks of 20 tokens, .* set it to one of 1, 2, 4\."):
        found.kv_cache_needs()


def test_chunks_that_no_block_size_divides_are_refused() -> None:
    class Large(ReferenceAttention):
        def kv_layout(self) -> KVLayout:
            return replace(super().kv_layout(), block_sizes=(16, 32))

    class LargeBlocks(Platform):
        def attention_backend(self, spec: AttentionSpec) -> ReferenceAttention:
            return Large(spec)

    found = manager(LargeBlocks())
    found.set_layers(layers_of(20, None))
    with pytest.raises(CacheError, match=r"in chunks of 20 tokens, .*\(16, 32\)\. Set max_model_len to at most 20"):
        found.kv_cache_needs()


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
