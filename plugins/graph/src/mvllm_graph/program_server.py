"""The process of a graph compiler: python -m mvllm_graph.program_server FACTORY DESCRIPTOR.

DESCRIPTOR is that of a pipe to the worker. The process has the device's runtime, and torch only if the compiler
imports it. It ends when the worker does.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from mvllm.plugin_api import BlockTransfer, GraphCompiler, GraphProgram, StepGraph, StepSizes, Value
from mvllm_graph.shared_messages import SharedMessages

NUMBER = "number"
"""Key of the number of an earlier result among the inputs of a run."""

_EXPORTS, _IMPORTS = ("export_blocks", "export_slots"), ("import_blocks", "import_slots")
_OF_A_VALUE = frozenset({"kv_layout", "kv_bytes", "fill", "read_slots", "read_state", "write_state", "block_format"})
"""Methods whose first argument is a cache or a state."""


class _Program:
    """A program, and the values of its graphs by name."""

    def __init__(self, program: GraphProgram, graphs: list[StepGraph]) -> None:
        self.program = program
        self.values: dict[str, Value] = {value.name: value for graph in graphs for value in graph.inputs}


class _Server:
    """Serves the calls of a ProcessCompiler and its programs."""

    def __init__(self, compiler: GraphCompiler) -> None:
        self._compiler = compiler
        self._programs: dict[int, _Program] = {}
        self._arrays: dict[int, Any] = {}
        self._next = 0

    def call(self, target: int | None, method: str, arguments: list[Any], dropped: list[int]) -> Any:
        """One call.

        Args:
            target: Number of a program; None for the compiler.
            method: Name of the method.
            arguments: Its arguments: graphs as bytes, caches and states by name, earlier results by number.
            dropped: Numbers of results that the worker no longer has.
        """
        for number in dropped:
            self._arrays.pop(number, None)
        if target is None:
            return self._call_compiler(method, arguments)
        program, values = self._programs[target].program, self._programs[target].values
        if method == "run":
            graph, inputs, sizes = arguments
            given = {name: self._array(value) for name, value in inputs.items()}
            results = program.run(graph, given, msgspec.convert(sizes, StepSizes))
            return [self._numbered(array) for array in results]
        if method in _EXPORTS:
            value, rows, num_bytes = arguments
            out = np.empty((len(rows), num_bytes), np.uint8)
            _wait(getattr(program, method)(values[value], rows, out))
            return out
        if method in _IMPORTS:
            return _wait(getattr(program, method)(values[arguments[0]], *arguments[1:]))
        if method == "to_host":
            return program.to_host(self._arrays[arguments[0]])
        if method in _OF_A_VALUE:
            arguments = [values[arguments[0]], *arguments[1:]]
        elif method == "set_weight" and program.keeps_arrays:
            arguments = [arguments[0], arguments[1].copy()]  # the next message overwrites it
        result = getattr(program, method)(*arguments)
        if method == "close":
            del self._programs[target]
        return [result.block_sizes, result.bytes_per_token] if method == "kv_layout" else result

    def _call_compiler(self, method: str, arguments: list[Any]) -> Any:
        if method == "modules":
            return sorted(sys.modules)
        if method == "unsupported":
            return self._compiler.unsupported(StepGraph.from_bytes(arguments[0]))
        if method == "operations":
            return sorted(self._compiler.operations())
        graphs = [StepGraph.from_bytes(data) for data in arguments[0]]
        self._next += 1
        self._programs[self._next] = _Program(self._compiler.program(graphs), graphs)
        return self._next

    def _array(self, value: Any) -> Any:
        return self._arrays[value[NUMBER]] if isinstance(value, dict) else value

    def _numbered(self, array: Any) -> int:
        self._next += 1
        self._arrays[self._next] = array
        return self._next


def _wait(transfer: BlockTransfer | None) -> None:
    if transfer is not None:
        transfer.wait()


def serve(factory: str, connection: Connection) -> None:
    """Serves calls until the other end closes."""
    messages, worker = SharedMessages(connection), os.getppid()
    module, _, name = factory.partition(":")
    try:
        server = _Server(getattr(importlib.import_module(module), name)())
        messages.send((None, None), worker)
    except BaseException as e:  # noqa: BLE001  (raised in the worker)
        messages.send((None, _failure(e)), worker)
        return
    while True:
        try:
            call = messages.receive()
        except (EOFError, OSError):
            break
        reply: tuple[Any, tuple[str, str, str] | None]
        try:
            reply = (server.call(*call), None)
        except Exception as e:  # noqa: BLE001  (raised in the worker)
            reply = (None, _failure(e))
        del call
        messages.send(reply, worker)
    messages.close()


def _failure(error: BaseException) -> tuple[str, str, str]:
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
    return kind, str(error), "".join(traceback.format_exception(error))


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
