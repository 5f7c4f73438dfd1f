"""Calls of the compiled kernels through ctypes, and the recording of these calls for replay.

Every kernel that works on a step's tensors is called through a `Kernel`. If this thread is recording, the call is also
appended to the record, which `replay.py` executes later without Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

Call = tuple["Kernel", tuple[Any, ...]]
"""A kernel and the arguments that it was called with."""


class _ThreadState(threading.local):
    """The recording of this thread: its calls so far, the objects that they need, and why it is incomplete."""

    calls: list[Call] | None = None
    held: list[Any] | None = None
    refusal: str | None = None


_thread_state = _ThreadState()


class Kernel:
    """A function of the library that takes pointers and numbers, and returns nothing.

    Args:
        library: The kernels.
        name: The function's name.
        argtypes: Its parameters.
        weight: Index of the parameter that is the weight, if any.

    Attributes:
        name, argtypes, weight: As given.
        entry: Its index in the library's table of replayable functions; -1 if it is not there.
    """

    _restype: Any = None

    def __init__(
        self, library: ctypes.CDLL, name: str, argtypes: tuple[Any, ...], *, weight: int | None = None
    ) -> None:
        self.name = name
        self.weight = weight
        self.argtypes = argtypes
        self._function = getattr(library, name)
        self._function.argtypes, self._function.restype = argtypes, self._restype
        self.entry = int(library.mvllm_cpu_program_entry(name.encode(), len(argtypes)))

    def __call__(self, *args: Any) -> None:
        """Calls the function."""
        self._function(*args)
        self._record(args)

    def _record(self, args: tuple[Any, ...]) -> None:
        if _thread_state.calls is not None:
            _thread_state.calls.append((self, args))


class BlockingKernel(Kernel):
    """A kernel that waits for other processes with a timeout. It returns 1, or 0 if it has to be called again.

    Args:
        library, name, argtypes: As Kernel's.
        ahead: Index of the parameter for the address of the weights that are read next; 0 if unknown.
        check_peers: Called before each further call. Raises if the other processes will not arrive.

    Attributes:
        ahead, check_peers: As given.
    """

    _restype = ctypes.c_int

    def __init__(
        self,
        library: ctypes.CDLL,
        name: str,
        argtypes: tuple[Any, ...],
        *,
        ahead: int,
        check_peers: Callable[[], None],
    ) -> None:
        super().__init__(library, name, argtypes)
        self.ahead = ahead
        self.check_peers = check_peers

    def __call__(self, *args: Any) -> None:
        """Calls the function until it is done."""
        while not self._function(*args):
            self.check_peers()
        self._record(args)


def record(run: Callable[[], Any]) -> tuple[Any, list[Call], list[Any], str | None]:
    """Runs `run` on this thread and records its kernel calls.

    Returns:
        The result, the calls in order, the objects that must live as long as the record (`hold`), and why the record is
        incomplete (None if `refuse` was not called).
    """
    assert _thread_state.calls is None, "recordings do not nest"
    _thread_state.calls, _thread_state.held, _thread_state.refusal = [], [], None
    try:
        result = run()
        return result, _thread_state.calls, _thread_state.held, _thread_state.refusal
    finally:
        _thread_state.calls = _thread_state.held = None


def hold(*owners: Any) -> None:
    """Keeps the owners of memory that recorded calls refer to, except tensors of the step, as long as the record."""
    if _thread_state.held is not None:
        _thread_state.held += owners


def is_recording() -> bool:
    """Whether this thread's calls are recorded."""
    return _thread_state.calls is not None


def refuse(reason: str) -> None:
    """Marks the current recording, if any, as incomplete: work happens that it does not record."""
    if _thread_state.calls is not None and _thread_state.refusal is None:
        _thread_state.refusal = reason
