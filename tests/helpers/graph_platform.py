"""The platform `graph-interpreter`: models run as StepGraphs, with the definitions of their operations, on the host."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl
from mvllm.plugin_api.graph import GraphCompiler, GraphPlatform, Interpreter

SPEC = PlatformSpec(
    name="graph-interpreter",
    vendor="tests",
    contract=(1, 1),
    probe="tests.helpers.graph_platform:probe",
    factory="tests.helpers.graph_platform:InterpreterPlatform",
    by_name_only=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "interprets graphs on the host")


class InterpreterPlatform(GraphPlatform):
    """The host, through the interpreter of graphs."""

    dtypes = ("float32", "bfloat16", "float16")

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    def graph_compiler(self) -> GraphCompiler:
        return Interpreter()
