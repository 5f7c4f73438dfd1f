"""The platform `graph-interpreter`: models run as StepGraphs, with the definitions of their operations, on the host.

The environment variable GRAPH_FAULT names a clause that its programs violate.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mvllm.plugin_api import Capabilities, PlatformSpec, ProbeResult, hookimpl
from mvllm_graph import GraphCompiler, GraphPlatform, GraphProgram, Interpreter, StepGraph, StepSizes
from tests.helpers.plugins import ROOT, write_metadata

FAULT = "GRAPH_FAULT"

SPEC = PlatformSpec(
    name="graph-interpreter",
    vendor="tests",
    contract=(1, 1),
    probe="plugins.graph.tests.interpreter_platform:probe",
    factory="plugins.graph.tests.interpreter_platform:InterpreterPlatform",
    by_name_only=True,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "interprets graphs on the host")


def graph_platform_path(folder: Path) -> list[str]:
    """Search path entries of this platform, whose metadata are written to a folder."""
    metadata = write_metadata(folder, "mvllm-graph-interpreter", f"[mvllm.platforms]\ngraph-interpreter = {__name__}\n")
    return [str(metadata), str(ROOT)]


class InterpreterPlatform(GraphPlatform):
    """The host, through the interpreter of graphs."""

    dtypes = ("float32", "bfloat16", "float16")

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, kv_transfer=True, stores_by_block_table=os.environ.get(FAULT) == "KVL-03")

    def graph_compiler(self) -> GraphCompiler:
        fault = os.environ.get(FAULT)
        return Interpreter() if fault is None else FaultyCompiler(fault)


class FaultyCompiler(Interpreter):
    """An interpreter whose programs violate one clause."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def operations(self) -> Collection[str]:
        found = set(super().operations())
        return found | {"an_operation_of_tomorrow"} if self._fault == "GRA-05" else found

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        return FaultyProgram(super().program(graphs), self._fault)


class FaultyProgram(GraphProgram):
    """A program with a fault in front of it."""

    def __init__(self, program: GraphProgram, fault: str) -> None:
        self._program, self._fault = program, fault
        self._arrays: dict[str, np.ndarray] = {}

    def __getattribute__(self, name: str) -> Any:
        own = ("_program", "_fault", "_arrays", "keeps_arrays", "set_weight", "finish_weights", "run", "free_caches")
        return object.__getattribute__(self if name in own else object.__getattribute__(self, "_program"), name)

    def set_weight(self, name: str, array: np.ndarray) -> None:
        if self._fault == "GRA-02":
            self._arrays[name] = array
        else:
            self._program.set_weight(name, array)

    def finish_weights(self) -> None:
        for name, array in self._arrays.items():
            self._program.set_weight(name, array)
        self._program.finish_weights()

    def run(self, graph: str, inputs: Mapping[str, Any], sizes: StepSizes) -> Sequence[Any]:
        if self._fault == "KVL-03" and "key" in inputs:
            # Stores by block table as it claims, but from the begin of the block.
            slots = inputs["slot_mapping.0"]
            first = slots.min(initial=2**30, where=slots >= 0)
            inputs = {**inputs, "slot_mapping.0": np.where(slots < 0, -1, slots - first % 16).astype(np.int32)}
        if self._fault == "GRA-07" and "item_index" in inputs:  # the rows are left out
            inputs = {**inputs, "item_index": np.full_like(inputs["item_index"], -1)}
        outputs = self._program.run(graph, inputs, sizes)
        if self._fault == "GRA-01" and sizes.requests > 2:
            outputs = [output + 0.01 * output.abs().max() for output in outputs]
        if self._fault == "GRA-06" and graph.startswith("model."):  # as if it summed over ranks as well
            outputs = [2 * output for output in outputs]
        if self._fault == "GRA-03" and "positions" in inputs:
            inputs["positions"][:] = 0
        return outputs

    def free_caches(self) -> None:
        if self._fault == "GRA-04":
            raise RuntimeError("caches cannot be freed")
        self._program.free_caches()

    # The abstract methods; __getattribute__ leads to those of the program.
    kv_layout = allocate_caches = to_host = None  # type: ignore[assignment]
