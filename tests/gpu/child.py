"""Runs items of one part in this process: `python -m tests.gpu.child PART SETTINGS DONE`. See runner.py.

Standard input has a line for each item: the seconds that it may take, on the system's clock, and its name. After each
item a line is appended to the file DONE: `done` (with or without failures among its rows), or `fresh process needed`
when an unexpected error has left the process in a state that the next item had better not inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import replace

from tests.gpu.parts import load
from tests.gpu.result_log import FAILED, ResultLog, Row
from tests.gpu.runner import DONE, FRESH_PROCESS_NEEDED
from tests.gpu.settings import Settings

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """When the parent ends, or says so, this process does, with all that it has started: they are one process group."""
    signal.signal(signal.SIGTERM, lambda *unused: os.killpg(os.getpgrp(), signal.SIGKILL))
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """See the module."""
    end_with_parent()
    name, settings = sys.argv[1], Settings.from_json(sys.argv[2])
    # Processes that an item starts have no standard input: it is the parent's.
    names = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    part, result_log = load(name), ResultLog(settings.out)
    for line in iter(names.readline, ""):
        left, _, item = line.rstrip("\n").partition(" ")
        own, report = replace(settings, deadline=time.monotonic() + float(left)), DONE
        try:
            part.run(item, own, result_log)
        except AssertionError as e:
            result_log.add(Row(name, item, item, FAILED, note=str(e) or "an assertion failed, see the log"))
            traceback.print_exc()
        except Exception as e:
            result_log.add(Row(name, item, item, FAILED, note=f"{type(e).__name__}: {e}"))
            traceback.print_exc()
            report = FRESH_PROCESS_NEEDED
        with open(sys.argv[3], "a") as done:
            done.write(report + "\n")
        if report != DONE:
            return


if __name__ == "__main__":
    main()
