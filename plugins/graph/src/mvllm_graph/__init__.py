"""Models as graphs: for platforms whose device has a compiler or runtime of its own.

`mvllm.plugin_api.graph` is this module under the name of the platform contract. Importing it loads neither torch nor a
device library. Names that need torch are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mvllm.extension_api.contract import substitute
from mvllm.plugin_api import (
    CacheValue,
    DeviceArray,
    Dim,
    GraphCompiler,
    GraphProgram,
    Kind,
    Node,
    StateValue,
    StepGraph,
    StepSizes,
    Value,
)

if TYPE_CHECKING:
    from mvllm_graph.interpreter import Interpreter
    from mvllm_graph.operations import GRAPH_OPERATIONS, GraphOperation
    from mvllm_graph.platform import GraphPlatform
    from mvllm_graph.program_process import ProcessCompiler

_LAZY = {
    "GRAPH_OPERATIONS": "mvllm_graph.operations",
    "GraphOperation": "mvllm_graph.operations",
    "GraphPlatform": "mvllm_graph.platform",
    "Interpreter": "mvllm_graph.interpreter",
    "ProcessCompiler": "mvllm_graph.program_process",
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
        raise AttributeError(f"module 'mvllm_graph' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
