"""Programs in a process of their own, which has the device's runtime and not torch.

A platform whose runtime cannot share a process with torch, or need not have it in memory, returns a ProcessCompiler:

    worker, with torch: tracing, weights, sampling   <── pipe, shared memory ──>   compiler and programs

The process starts with the first call, and ends with the worker.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import msgspec
import numpy as np

from mvllm.plugin_api import (
    CacheValue,
    DeviceArray,
    GraphCompiler,
    GraphProgram,
    KVLayout,
    PlatformError,
    StateValue,
    StepGraph,
    StepSizes,
)
from mvllm_graph.program_server import NUMBER
from mvllm_graph.shared_messages import SharedMessages

_END_SECONDS = 5.0


class ProcessCompiler(GraphCompiler):
    """A graph compiler in a process of its own.

    If the process has ended unexpectedly, calls of its programs raise, and the next call of the compiler starts another
    one.

    Args:
        factory: `package.module:Class` of the compiler, which takes no arguments.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._process: _CompilerProcess | None = None
        self._operations: frozenset[str] | None = None

    def operations(self) -> Collection[str]:
        if self._operations is None:
            self._operations = frozenset(self._call("operations"))
        return self._operations

    def unsupported(self, graph: StepGraph) -> list[str]:
        reasons: list[str] = self._call("unsupported", graph.to_bytes())
        return reasons

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        number = self._call("program", [graph.to_bytes() for graph in graphs])
        assert self._process is not None
        return _ProcessProgram(self._process, number)

    def modules(self) -> list[str]:
        """Names of the modules that the process has imported."""
        names: list[str] = self._call("modules")
        return names

    @property
    def pid(self) -> int | None:
        """ID of the running process; None if there is none."""
        return self._process.pid if self._process is not None and self._process.is_alive else None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the compiler, in a new process if the present one has ended."""
        if (process := self._process) is not None and process.is_alive:
            try:
                return process.call(None, method, *arguments)
            except PlatformError:
                if process.is_alive:
                    raise
        self._process = _CompilerProcess(self._factory)
        return self._process.call(None, method, *arguments)


_running: weakref.WeakSet[_CompilerProcess] = weakref.WeakSet()


def compiler_pids() -> list[int]:
    """IDs of the compiler processes that this process has started and that still run."""
    return [process.pid for process in list(_running) if process.is_alive]


class _CompilerProcess:
    """One process of a compiler, from its start to its end.

    Args:
        factory: As in ProcessCompiler.

    Raises:
        PlatformError: The compiler cannot be made.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        ours, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            command = [sys.executable, "-m", "mvllm_graph.program_server", factory, str(descriptor)]
            self._process = subprocess.Popen(command, pass_fds=(descriptor,))
        self._messages = SharedMessages(ours)
        self._dropped: list[int] = []
        self._failure: PlatformError | None = None
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._messages, self._process)
        _running.add(self)
        self._raise(self._exchange(None)[1])

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it answers calls."""
        return self._failure is None and self._finalizer.alive and self._process.poll() is None

    def call(self, target: int | None, method: str, *arguments: Any) -> Any:
        """Calls a method of the compiler or of one of its programs.

        Args:
            target: Number of the program; None for the compiler.

        Raises:
            MemoryError, PlatformError: The method has raised it, or another error, or the process has ended.
        """
        dropped, self._dropped = self._dropped, []
        result, failure = self._exchange((target, method, arguments, dropped))
        self._raise(failure)
        return result

    def drop(self, number: int) -> None:
        """The worker no longer has a result; the next call tells the process."""
        self._dropped.append(number)

    def release_buffer(self) -> None:
        """Frees the memory in which large arrays were sent."""
        self._messages.release()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._finalizer()

    def _exchange(self, message: object) -> Any:
        """Sends a message, if there is one, and waits for the next answer."""
        if self._failure is not None:
            raise PlatformError(str(self._failure))
        try:
            with self._lock:
                if message is not None:
                    self._messages.send(message, self.pid)
                return self._messages.receive()
        except (EOFError, OSError) as e:
            self._failure = self._unexpected_end()
            raise self._failure from e

    def _unexpected_end(self) -> PlatformError:
        self.close()
        code = self._process.returncode
        how, why = f"exit code {code}", ""
        if code < 0:
            with suppress(ValueError):  # a signal without name
                how = f"{signal.Signals(-code).name} ({how})"
        if code == -signal.SIGKILL:
            why = " The system sends this signal when memory is full: give the engine less memory."
        return PlatformError(
            f"The process of the graph compiler {self._factory} (pid {self.pid}) has ended with {how}.{why} Its "
            "weights and KV caches are lost; its last messages are in the output above. Start the engine again: that "
            "starts a new process."
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

    def __init__(self, process: _CompilerProcess, number: int) -> None:
        self.number = number
        weakref.finalize(self, process.drop, number)


class _ProcessProgram(GraphProgram):
    """A program in the process."""

    def __init__(self, process: _CompilerProcess, number: int) -> None:
        self._process, self._number = process, number
        self._is_closed = False

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._process.call(self._number, method, *arguments)

    def set_weight(self, name: str, array: np.ndarray) -> None:
        self._call("set_weight", name, array)

    def finish_weights(self) -> None:
        self._call("finish_weights")
        self._process.release_buffer()  # as large as the largest weight

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
        return [_ProcessArray(self._process, number) for number in numbers]

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

    def block_format(self, cache: CacheValue) -> str:
        found: str = self._call("block_format", cache.name)
        return found

    def export_blocks(self, cache: CacheValue, blocks: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._call("export_blocks", cache.name, blocks, out.shape[1])

    def import_blocks(self, cache: CacheValue, blocks: np.ndarray, data: np.ndarray) -> None:
        self._call("import_blocks", cache.name, blocks, data)

    def export_slots(self, state: StateValue, slots: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._call("export_slots", state.name, slots, out.shape[1])

    def import_slots(self, state: StateValue, slots: np.ndarray, data: np.ndarray) -> None:
        self._call("import_slots", state.name, slots, data)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._process.is_alive:
                self._call("close")


def _end(messages: SharedMessages, process: subprocess.Popen[bytes]) -> None:
    """The process ends when its pipe closes."""
    messages.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
