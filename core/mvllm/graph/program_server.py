"""The process of a graph compiler: python -m mvllm.graph.program_server FACTORY DESCRIPTOR.

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

import psutil

from mvllm.graph.shared_messages import SharedMessages
from mvllm.plugin_api.graph import GraphCompiler, GraphProgram


class _Server:
    """Serves the calls of a ProcessCompiler and its programs."""

    def __init__(self, compiler: GraphCompiler) -> None:
        self._compiler = compiler
        self._programs: dict[int, GraphProgram] = {}
        self._arrays: dict[int, Any] = {}
        self._next = 0

    def call(self, target: int | None, method: str, arguments: tuple[Any, ...], dropped: list[int]) -> Any:
        """One call.

        Args:
            target: Number of a program; None for the compiler.
            method: Name of the method.
            arguments: Its arguments; `ArrayNumber` for results of earlier calls.
            dropped: Numbers of results that the worker no longer has.
        """
        for number in dropped:
            self._arrays.pop(number, None)
        if target is None:
            return self._call_compiler(method, arguments)
        program = self._programs[target]
        if method == "run":
            graph, inputs, sizes = arguments
            given = {name: self._array(value) for name, value in inputs.items()}
            return [self._numbered(array) for array in program.run(graph, given, sizes)]
        if method == "to_host":
            return program.to_host(self._array(arguments[0]))
        result = getattr(program, method)(*(_own(a) if program.keeps_arrays else a for a in arguments))
        if method == "close":
            del self._programs[target]
        return result

    def _call_compiler(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "memory":
            return psutil.Process().memory_info().rss
        if method == "modules":
            return sorted(sys.modules)
        result = getattr(self._compiler, method)(*arguments)
        if method != "program":
            return list(result)
        self._next += 1
        self._programs[self._next] = result
        return self._next

    def _array(self, value: Any) -> Any:
        return self._arrays[value.number] if isinstance(value, ArrayNumber) else value

    def _numbered(self, array: Any) -> int:
        self._next += 1
        self._arrays[self._next] = array
        return self._next


class ArrayNumber:
    """A result of an earlier `run`, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _own(argument: Any) -> Any:
    """A copy of an array, whose memory the next message overwrites."""
    return argument.copy() if hasattr(argument, "__array_interface__") else argument


def serve(factory: str, connection: Connection) -> None:
    """Serves calls until the other end closes."""
    messages, worker = SharedMessages(connection), os.getppid()
    module, _, name = factory.partition(":")
    try:
        server = _Server(getattr(importlib.import_module(module), name)())
        messages.send((None, None), worker)
    except BaseException as e:
        messages.send((None, _failure(e)), worker)
        return
    while True:
        try:
            call = messages.receive()
        except (EOFError, OSError):
            break
        try:
            reply = (server.call(*call), None)
        except Exception as e:
            reply = (None, _failure(e))
        del call
        messages.send(reply, worker)
    messages.close()


def _failure(error: BaseException) -> tuple[str, str, str]:
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
    return kind, str(error), "".join(traceback.format_exception(error))


if __name__ == "__main__":
    from mvllm.graph import program_server  # the module under its own name, for pickles

    program_server.serve(sys.argv[1], Connection(int(sys.argv[2])))
