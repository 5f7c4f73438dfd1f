"""The MLX platform: its compiler, and the sizes to which steps are padded."""

from __future__ import annotations

from dataclasses import replace

from mvllm.plugin_api import Capabilities, PlatformSpec, ShapePolicy
from mvllm_graph import GraphCompiler, GraphPlatform, ProcessCompiler
from mvllm_mlx.plugin import SPEC

_LARGEST = 1 << 20
"""More tokens, requests and blocks than any step has."""


class MLXPlatform(GraphPlatform):
    """Models through MLX: Metal on Apple silicon, the processor elsewhere."""

    dtypes = ("bfloat16", "float16", "float32")

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, kv_transfer=True)

    def graph_compiler(self) -> GraphCompiler:
        """The compiler, in a process of its own: no process has both MLX and torch."""
        return ProcessCompiler("mvllm_mlx.compiler:MLXCompiler")

    def shapes(self) -> ShapePolicy:
        """Powers of two, and above 16 also the sizes half-way between: MLX compiles each combination anew."""
        powers = [1 << i for i in range(_LARGEST.bit_length())]
        sizes = sorted({*powers, *(power + power // 2 for power in powers if power >= 16)})
        return ShapePolicy(tokens=tuple(sizes), requests=tuple(powers), pages=tuple(powers))


def make_platform() -> MLXPlatform:
    """The platform; the factory of its PlatformSpec."""
    return MLXPlatform()
