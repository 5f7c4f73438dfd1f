"""Calls of the compiled kernels, and the recording of them.

Every kernel that works on a step's tensors is called through a `Kernel`. That is an ordinary call; where this thread is
recording, it is written down as well, and `replay.py` makes it again later without Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

Call = tuple["Kernel", tuple[Any, ...]]
"""A kernel and the arguments that it was called with."""


class _OfThread(threading.local):
    calls: list[Call] | None = None
    refusal: str | None = None


_here = _OfThread()


class Kernel:
    """A function of the library that takes pointers and numbers, and returns nothing.

    Args:
        library: The kernels.
        name: The function's name.
        argtypes: Its parameters.
        weight: Which of them is the weight that it reads, if any.

    Attributes:
        name, argtypes, weight: As given.
        entry: Its number for programs; -1 where they cannot call it.
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
        if _here.calls is not None:
            _here.calls.append((self, args))


class BlockingKernel(Kernel):
    """A kernel that waits for other processes, and not for ever: it returns 1, or 0 where it wants to be called again.

    Args:
        library, name, argtypes: As Kernel's.
        ahead: Which parameter says where the weights lie that are read next; 0 there where nobody knows.
        check_peers: Called before each further call. Ends the matter with an exception where the others will not come.

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
        """Calls the function until it is through."""
        while not self._function(*args):
            self.check_peers()
        self._record(args)


def record(run: Callable[[], Any]) -> tuple[Any, list[Call], str | None]:
    """Runs `run` on this thread; its result, the kernels that it called in order, and why they are not all of its work.

    The reason is None where nobody has called `refuse`.
    """
    assert _here.calls is None, "recordings do not nest"
    _here.calls, _here.refusal = [], None
    try:
        result = run()
        return result, _here.calls, _here.refusal
    finally:
        _here.calls = None


def is_recording() -> bool:
    """Whether this thread's calls are being written down."""
    return _here.calls is not None


def refuse(reason: str) -> None:
    """Says, while a recording is under way, that something happens which it does not see."""
    if _here.calls is not None and _here.refusal is None:
        _here.refusal = reason
