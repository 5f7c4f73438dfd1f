"""Public interface for platforms whose device has a compiler or runtime of its own.

Importing it loads neither torch nor a device library. Names that need torch are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.platform.graph_compiler import DeviceArray, GraphCompiler, GraphProgram
from mvllm.platform.step_graph import CacheValue, Dim, Kind, Node, StateValue, StepGraph, StepSizes, Value, substitute

if TYPE_CHECKING:
    from mvllm.graph.interpreter import Interpreter
    from mvllm.graph.operations import GRAPH_OPERATIONS, GraphOperation
    from mvllm.graph.platform import GraphPlatform
    from mvllm.graph.program_process import ProcessCompiler

_LAZY = {
    "GRAPH_OPERATIONS": "mvllm.graph.operations",
    "GraphOperation": "mvllm.graph.operations",
    "GraphPlatform": "mvllm.graph.platform",
    "ProcessCompiler": "mvllm.graph.program_process",
    "Interpreter": "mvllm.graph.interpreter",
}

__all__ = [
    "CacheValue",
    "DeviceArray",
    "Dim",
    "GRAPH_OPERATIONS",
    "GraphCompiler",
    "GraphOperation",
    "GraphPlatform",
    "GraphProgram",
    "Interpreter",
    "Kind",
    "Node",
    "ProcessCompiler",
    "StateValue",
    "StepGraph",
    "StepSizes",
    "Value",
    "substitute",
]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'mvllm.plugin_api.graph' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
