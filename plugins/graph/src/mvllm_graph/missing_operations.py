"""Which operations of a model's graphs a compiler does not have."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.plugin_api import GraphCompiler, PlatformError, StepGraph


def missing_operations(graphs: Sequence[StepGraph], compiler: GraphCompiler) -> list[str]:
    """Operations of the graphs that the compiler does not name, in their order."""
    known = set(compiler.operations())
    return [op for op in dict.fromkeys(node.op for graph in graphs for node in graph.nodes) if op not in known]


def check_translated(graphs: Sequence[StepGraph], compiler: GraphCompiler, model: str) -> None:
    """Checks that a compiler translates all graphs of a model.

    Raises:
        PlatformError: It does not; the message has all reasons and all missing operations.
    """
    reasons = [reason for graph in graphs for reason in compiler.unsupported(graph)]
    if not reasons:
        return
    missing = missing_operations(graphs, compiler)
    remedy = "Choose another model or platform."
    if missing:
        remedy = (
            f"`operations` of the compiler has to name: {', '.join(missing)}. For their definitions, run: "
            f"mvllm ops --graph {' '.join(missing)}. Without them, choose another model or platform."
        )
    raise PlatformError(f"The platform's compiler cannot run {model}: {' '.join(dict.fromkeys(reasons))} {remedy}")
