"""What SIGTERM, SIGHUP and Ctrl-C mean to a server that nothing else has taken them in hand for yet: it ends, at once.

From its first line on, while modules are imported and while the model is loaded. Nobody has been promised an answer,
and whatever was started dies with this process, so there is nothing to do but to remove what would be left on disk.
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
"""What the end of a server may take after its last answer; the processes below it have shorter limits of their own."""

_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGHUP"))

_to_remove: list[Path] = []
_handled: set[int] = set()
_is_program = False


def exit_on_signals() -> None:
    """From now on, until somebody else handles them. Does nothing outside the main thread, where nobody can.

    A signal that is ignored, as by `nohup` or a shell's `&`, stays so.
    """
    global _is_program
    if threading.current_thread() is not threading.main_thread():
        return
    _is_program = True
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle_signal)
            _handled.add(number)


def shutdown_signals() -> list[signal.Signals]:
    """The signals that end a server: SIGTERM, SIGINT, and SIGHUP, unless that is ignored, as by `nohup`."""
    return [number for number in _SIGNALS if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def remove_on_exit(path: Path) -> None:
    """Has a file removed if a signal ends this process."""
    _to_remove.append(path)


def exit_now(number: int) -> NoReturn:
    """Ends this process as a signal does: status 130 for Ctrl-C, 0 for others."""
    for path in _to_remove:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 0)


def force_exit_after(seconds: float) -> None:
    """Has this process ended with status 1, and its threads' stacks on stderr, if it has not ended by then.

    For what comes after the last answer. The clock runs without the interpreter, so that no thread can hold it up.
    Does nothing where `exit_on_signals` has not been called: then the process is somebody else's.
    """
    if _is_program:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def exit_program(status: int) -> NoReturn:
    """Ends this process without a wait for its threads, one of which may be busy for hours in a library's code.

    What is registered with `atexit` is done; the interpreter's own end would join threads first.
    """
    from mvllm.executor.process.process_utils import exit_process  # the first lines of a program wait for no imports

    force_exit_after(SHUTDOWN_SECONDS)
    atexit._run_exitfuncs()
    exit_process(status)


def ignore_shutdown_signals() -> None:
    """From now on: what they ask for is being done, and its exit status is to be told.

    Does nothing where `exit_on_signals` has not been called: then signals are somebody else's.
    """
    if _handled:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"Ended before the model was loaded.\n")
    exit_now(number)
