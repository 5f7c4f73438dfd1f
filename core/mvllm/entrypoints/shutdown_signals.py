"""Signal handling of `mvllm serve` while it starts: SIGTERM, SIGHUP and Ctrl-C end the process at once.

These handlers hold until the server installs its own, that is, during imports and while the model is loaded. No request
has been accepted by then and child processes end with this one, so only files have to be removed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130
SHUTDOWN_SECONDS = 30.0
"""Seconds that a server may take to exit after its last response. Its child processes have shorter limits."""

_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGHUP"))

_to_remove: list[Path] = []
_handled: set[int] = set()
_is_program = False


def exit_on_signals() -> None:
    """Installs the handlers of this module. Does nothing outside the main thread, which cannot set handlers.

    Signals that are ignored, as under `nohup` or a shell's `&`, stay ignored.
    """
    global _is_program
    if threading.current_thread() is not threading.main_thread():
        return
    _is_program = True
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_signal)
            _handled.add(number)


def exits_on_signals() -> bool:
    """Whether `exit_on_signals` has been called: this process is a server's program."""
    return _is_program


def shutdown_signals() -> list[signal.Signals]:
    """The signals that end a server: SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under `nohup`."""
    return [number for number in _SIGNALS if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def remove_on_exit(path: Path) -> None:
    """Registers a file that `exit_now` removes."""
    _to_remove.append(path)


def exit_now(number: int) -> NoReturn:
    """Removes the registered files and exits: status 130 for Ctrl-C, 0 for other signals."""
    for path in _to_remove:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 0)


def force_exit_after(seconds: float) -> None:
    """Starts a timer that ends this process with status 1 and prints the stacks of its threads to stderr.

    It limits the shutdown after the last response. The timer does not need the interpreter lock, so no thread can delay
    it. Does nothing if `exit_on_signals` has not been called: then another program runs this code.
    """
    if _is_program:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def exit_program(status: int) -> NoReturn:
    """Exits without joining threads, which may be busy in a library for hours. Runs the `atexit` functions.

    The interpreter's own exit joins threads before it runs these functions.
    """
    from mvllm.executor.process.process_utils import exit_process  # keeps the import of this module fast

    force_exit_after(SHUTDOWN_SECONDS)
    atexit._run_exitfuncs()
    exit_process(status)


def ignore_shutdown_signals() -> None:
    """Ignores the signals from now on: the shutdown has started and must end with its own exit status.

    Does nothing if `exit_on_signals` has not been called: then another program handles signals.
    """
    if _handled:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"Ended before the model was loaded.\n")
    exit_now(number)
