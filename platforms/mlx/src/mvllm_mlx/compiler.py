"""GraphCompiler of the MLX platform: which operations it computes, and the program made of graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mvllm.plugin_api import AttentionSpec, PlatformError
from mvllm_graph import CacheValue, GraphCompiler, GraphProgram, StepGraph
from mvllm_mlx.arrays import ARRAYS
from mvllm_mlx.attention import ATTENTION
from mvllm_mlx.lowering import DTYPES, Lowering
from mvllm_mlx.named import NAMED
from mvllm_mlx.program import MLXProgram
from mvllm_mlx.states import STATES

TABLE: dict[str, Lowering] = {**ARRAYS, **NAMED, **STATES, **ATTENTION}
"""The lowering of each operation, by its name."""


KV_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in which keys and values are stored."""


class MLXCompiler(GraphCompiler):
    """Makes MLX functions of step graphs."""

    def operations(self) -> Collection[str]:
        return TABLE.keys()

    def unsupported(self, graph: StepGraph) -> list[str]:
        dtypes = [value.dtype for value in graph.values().values() if value.kind not in ("cache", "state")]
        unknown = dict.fromkeys(dtype for dtype in dtypes if dtype not in DTYPES)
        reasons = [f"MLX has no arrays of {dtype}." for dtype in unknown]
        specs = [value.spec for value in graph.inputs if isinstance(value, CacheValue)]
        return list(dict.fromkeys([*super().unsupported(graph), *reasons, *(r for s in specs for r in _lacks(s))]))

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        if reasons := [reason for graph in graphs for reason in self.unsupported(graph)]:
            raise PlatformError(f"The MLX platform cannot run this model: {' '.join(reasons)}")
        return MLXProgram(graphs, TABLE)


def _lacks(spec: AttentionSpec) -> list[str]:
    """What a layer of attention asks for and MLXProgram does not have."""
    reasons = []
    if spec.kv_dtype not in KV_DTYPES:
        reasons.append(f"Keys and values are stored as {', '.join(KV_DTYPES)}, not as {spec.kv_dtype}.")
    if spec.indexer or spec.index_topk is not None:
        reasons.append("Sparse attention is not translated.")
    return reasons
