"""Runs items of one part in this process: `python -m tests.gpu.child PART SETTINGS DONE ITEM ...`. See runner.py.

Exit status 0 when every item is done, with or without failures among its rows; 3 when an unexpected error has
left the process in a state that the rest had better not inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback

from tests.gpu.parts import load
from tests.gpu.result_log import FAILED, ResultLog, Row
from tests.gpu.runner import FRESH_PROCESS_NEEDED
from tests.gpu.settings import Settings

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """When the parent ends, or says so, this process does, with all that it has started: they are one process group."""
    signal.signal(signal.SIGTERM, lambda *unused: os.killpg(os.getpgrp(), signal.SIGKILL))
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    """See the module."""
    end_with_parent()
    name, settings = sys.argv[1], Settings.from_json(sys.argv[2])
    part, result_log = load(name), ResultLog(settings.out)
    for item in sys.argv[4:]:
        unforeseen = False
        try:
            part.run(item, settings, result_log)
        except AssertionError as e:
            result_log.add(Row(name, item, item, FAILED, note=str(e) or "an assertion failed, see the log"))
            traceback.print_exc()
        except Exception as e:
            result_log.add(Row(name, item, item, FAILED, note=f"{type(e).__name__}: {e}"))
            traceback.print_exc()
            unforeseen = True
        with open(sys.argv[3], "a") as done:
            done.write(item + "\n")
        if unforeseen:
            return FRESH_PROCESS_NEEDED
    return 0


if __name__ == "__main__":
    sys.exit(main())
