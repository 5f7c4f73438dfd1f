"""Lets Ctrl-C take effect between two steps of the engine, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps(wake: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Holds back the first Ctrl-C until the yielded function is called, which then raises KeyboardInterrupt.

    A second Ctrl-C is not held back. Outside the main thread, or where the program handles SIGINT itself, nothing
    changes.

    Args:
        wake: Called at the first Ctrl-C, so that whoever waits for a step in another process need not wait longer.
    """
    pending = False

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True
        wake()

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
