#!/usr/bin/env python3
"""Runs a console script, and ends the process with its exit status but without the destructors of native libraries.

    python ci/without_destructors.py pytest -q ...

At the end of a process, torch_xla's static objects are destroyed while XLA's threads may still use them, and one run in
dozens ends with a segmentation fault after everything has passed (https://github.com/pytorch/xla/issues/4033). What
scripts leave to the end themselves, the functions of `atexit`, still runs.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from importlib.metadata import entry_points


def run(name: str) -> int:
    """Runs a console script with the arguments in sys.argv. Returns its exit status."""
    [script] = entry_points(group="console_scripts", name=name)
    try:
        status = script.load()()
    except SystemExit as exit_:
        status = exit_.code
    if isinstance(status, str):
        print(status, file=sys.stderr)
        return 1
    return int(status or 0)


def main() -> None:
    del sys.argv[0]
    status = run(sys.argv[0])
    threading._shutdown()  # type: ignore[attr-defined]  # joins all threads but daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
