"""GraphCompiler of the MLX platform: which operations it computes, and the program made of graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mvllm.plugin_api import PlatformError
from mvllm.plugin_api.graph import GraphCompiler, GraphProgram, StepGraph
from mvllm_mlx.arrays import ARRAYS
from mvllm_mlx.attention import ATTENTION
from mvllm_mlx.lowering import DTYPES, Lowering
from mvllm_mlx.named import NAMED
from mvllm_mlx.program import MLXProgram

TABLE: dict[str, Lowering] = {**ARRAYS, **NAMED, **ATTENTION}
"""The lowering of each operation, by its name."""


class MLXCompiler(GraphCompiler):
    """Makes MLX functions of step graphs."""

    def operations(self) -> Collection[str]:
        return TABLE.keys()

    def unsupported(self, graph: StepGraph) -> list[str]:
        dtypes = [value.dtype for value in graph.values().values() if value.kind not in ("cache", "state")]
        unknown = dict.fromkeys(dtype for dtype in dtypes if dtype not in DTYPES)
        return [*super().unsupported(graph), *(f"MLX has no arrays of {dtype}." for dtype in unknown)]

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        if reasons := [reason for graph in graphs for reason in self.unsupported(graph)]:
            raise PlatformError(f"The MLX platform cannot run this model: {' '.join(reasons)}")
        return MLXProgram(graphs, TABLE)
