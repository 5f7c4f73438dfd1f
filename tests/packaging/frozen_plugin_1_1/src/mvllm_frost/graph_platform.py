"""A platform whose compiler is the interpreter, with a runtime of its own and a change of the plan."""

from dataclasses import replace

from mvllm.plugin_api import ConfigChange, LaunchTopology, Plan
from mvllm.plugin_api.graph import GRAPH_OPERATIONS, GraphCompiler, GraphPlatform, Interpreter
from mvllm_frost.graph_plugin import mvllm_platform


class FrostCompiler(GraphCompiler):
    def __init__(self):
        self.inner = Interpreter()

    def operations(self):
        return [name for name in self.inner.operations() if name in GRAPH_OPERATIONS]

    def unsupported(self, graph):
        return [f"{value.name} has no shape" for value in graph.inputs if value.shape is None]

    def program(self, graphs):
        return self.inner.program(graphs)


class FrostGraphs(GraphPlatform):
    dtypes = ("float32",)

    @property
    def spec(self):
        return mvllm_platform()

    @property
    def capabilities(self):
        return replace(super().capabilities, soft_cap=False, kv_transfer=True)

    def plan(self, config):
        answer = super().plan(config)
        return Plan((*answer.changes, ConfigChange("cache.block_size", 16, "the frost has cracks of sixteen")))

    def topology(self, parallel):
        return LaunchTopology(parallel.world_size, 1, ("uni", "mp"), ray_resource="FROST")

    def graph_compiler(self):
        return FrostCompiler()


def make_platform():
    return FrostGraphs()
