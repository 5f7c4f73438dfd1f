"""Programs in a process of their own, which has the device's runtime and not torch.

A platform whose runtime cannot share a process with torch, or need not have it in memory, returns a ProcessCompiler:

    worker, with torch: tracing, weights, sampling   <── pipe, shared memory ──>   compiler and programs

The process starts with the first call, and ends with the worker.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any

import msgspec
import numpy as np

from mvllm.errors import PlatformError
from mvllm.graph.program_server import NUMBER
from mvllm.graph.shared_messages import SharedMessages
from mvllm.platform.attention import KVLayout
from mvllm.platform.graph_compiler import DeviceArray, GraphCompiler, GraphProgram
from mvllm.platform.step_graph import CacheValue, StateValue, StepGraph, StepSizes

_END_SECONDS = 5.0


class ProcessCompiler(GraphCompiler):
    """A graph compiler in a process of its own.

    Args:
        factory: `package.module:Class` of the compiler, which takes no arguments.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: SharedMessages | None = None
        self._operations: frozenset[str] | None = None
        self._dropped: list[int] = []

    def operations(self) -> Collection[str]:
        if self._operations is None:
            self._operations = frozenset(self.call(None, "operations"))
        return self._operations

    def unsupported(self, graph: StepGraph) -> list[str]:
        reasons: list[str] = self.call(None, "unsupported", graph.to_bytes())
        return reasons

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        return _ProcessProgram(self, self.call(None, "program", [graph.to_bytes() for graph in graphs]))

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        size: int = self.call(None, "memory")
        return size

    def modules(self) -> list[str]:
        """Names of the modules that the process has imported."""
        names: list[str] = self.call(None, "modules")
        return names

    def call(self, target: int | None, method: str, *arguments: Any) -> Any:
        """Calls a method of the compiler or of one of its programs.

        Raises:
            MemoryError, PlatformError: The method has raised it, or another error, or the process has ended.
        """
        dropped, self._dropped = self._dropped, []
        messages = self._start() if self._messages is None else self._messages
        try:
            assert self._process is not None
            messages.send((target, method, arguments, dropped), self._process.pid)
            result, failure = messages.receive()
        except (EOFError, OSError) as e:
            raise self._ended() from e
        self._raise(failure)
        return result

    def drop(self, number: int) -> None:
        """The worker no longer has a result; the next call tells the process."""
        self._dropped.append(number)

    def close(self) -> None:
        """Ends the process. Idempotent; the next call starts another one."""
        if self._messages is not None and self._process is not None:
            _end(self._messages, self._process)
        self._messages = self._process = None

    def _start(self) -> SharedMessages:
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", "mvllm.graph.program_server", self._factory, str(descriptor)]
            self._process = subprocess.Popen(command, pass_fds=(descriptor,))
        self._messages = SharedMessages(ours)
        weakref.finalize(self, _end, self._messages, self._process)
        try:
            _, failure = self._messages.receive()
        except (EOFError, OSError) as e:
            raise self._ended() from e
        self._raise(failure)
        return self._messages

    def _ended(self) -> PlatformError:
        code = None if self._process is None else self._process.wait()
        return PlatformError(
            f"The process of the graph compiler {self._factory} has ended with exit code {code}. Its output is above; "
            "a negative number is a signal, and -9 often means that the machine's memory was full."
        )

    def _raise(self, failure: tuple[str, str, str] | None) -> None:
        if failure is None:
            return
        kind, message, text = failure
        if kind == "MemoryError":
            raise MemoryError(message)
        error = PlatformError(message if kind == "PlatformError" else f"{self._factory}: {kind}: {message}")
        error.add_note(f"In the process of the graph compiler:\n{text}")
        raise error


class _ProcessArray:
    """A result in the process."""

    def __init__(self, compiler: ProcessCompiler, number: int) -> None:
        self.number = number
        weakref.finalize(self, compiler.drop, number)


class _ProcessProgram(GraphProgram):
    """A program in the process."""

    def __init__(self, compiler: ProcessCompiler, number: int) -> None:
        self._compiler, self._number = compiler, number
        self._is_closed = False

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._compiler.call(self._number, method, *arguments)

    def set_weight(self, name: str, array: np.ndarray) -> None:
        self._call("set_weight", name, array)

    def finish_weights(self) -> None:
        self._call("finish_weights")

    def kv_layout(self, cache: CacheValue) -> KVLayout:
        block_sizes, bytes_per_token = self._call("kv_layout", cache.name)
        return KVLayout(tuple(block_sizes), bytes_per_token)

    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        self._call("allocate_caches", num_blocks, block_size)

    def free_caches(self) -> None:
        self._call("free_caches")

    def allocate_states(self, num_slots: int) -> None:
        self._call("allocate_states", num_slots)

    def run(
        self, graph: str, inputs: Mapping[str, np.ndarray | DeviceArray], sizes: StepSizes
    ) -> Sequence[DeviceArray]:
        given = {
            name: {NUMBER: value.number} if isinstance(value, _ProcessArray) else value
            for name, value in inputs.items()
        }
        numbers = self._call("run", graph, given, msgspec.to_builtins(sizes))
        return [_ProcessArray(self._compiler, number) for number in numbers]

    def to_host(self, array: DeviceArray) -> np.ndarray:
        found: np.ndarray = self._call("to_host", array.number)
        return found.copy()  # the next message overwrites it

    def kv_bytes(self, cache: CacheValue) -> int:
        size: int = self._call("kv_bytes", cache.name)
        return size

    def fill(self, cache: CacheValue, value: float) -> None:
        self._call("fill", cache.name, value)

    def read_slots(self, cache: CacheValue, slots: np.ndarray) -> Sequence[np.ndarray]:
        return [array.copy() for array in self._call("read_slots", cache.name, slots)]

    def read_state(self, state: StateValue) -> np.ndarray:
        found: np.ndarray = self._call("read_state", state.name)
        return found.copy()

    def write_state(self, state: StateValue, array: np.ndarray) -> None:
        self._call("write_state", state.name, array)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._call("close")


def _end(messages: SharedMessages, process: subprocess.Popen[bytes]) -> None:
    """The process ends when its pipe closes."""
    messages.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
