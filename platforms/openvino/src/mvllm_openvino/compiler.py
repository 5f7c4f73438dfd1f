"""GraphCompiler of the OpenVINO platform: which operations it translates, and the program made of graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mvllm.plugin_api import PlatformError
from mvllm_graph import CacheValue, GraphCompiler, GraphProgram, StepGraph
from mvllm_openvino.arrays import ARRAYS
from mvllm_openvino.attention import ATTENTION, unsupported
from mvllm_openvino.building import Lowering
from mvllm_openvino.experts import EXPERTS
from mvllm_openvino.named import NAMED
from mvllm_openvino.program import OpenVINOProgram

TABLE: dict[str, Lowering] = {**ARRAYS, **NAMED, **EXPERTS, **ATTENTION}
"""The lowering of each operation, by its name."""


class OpenVINOCompiler(GraphCompiler):
    """Translates step graphs to OpenVINO models."""

    def operations(self) -> Collection[str]:
        return TABLE.keys()

    def unsupported(self, graph: StepGraph) -> list[str]:
        reasons = super().unsupported(graph)
        caches = [value for value in graph.inputs if isinstance(value, CacheValue)]
        return [*reasons, *dict.fromkeys(reason for cache in caches for reason in unsupported(cache.spec))]

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        if reasons := [reason for graph in graphs for reason in self.unsupported(graph)]:
            raise PlatformError(f"The OpenVINO platform cannot run this model: {'; '.join(reasons)}.")
        return OpenVINOProgram(graphs, TABLE)
