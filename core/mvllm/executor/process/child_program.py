"""The program of every child process of an engine: `python -m ... <module> <name> <control socket> <parent pid>`.

It ties the process to its parent, then imports `module` and runs its `main`. The order matters: imports take seconds,
and a process whose parent is killed in the meantime must end as well.
"""

from __future__ import annotations

import importlib
import sys

from mvllm.executor.process.process_utils import die_with_parent


def main() -> None:
    """The program."""
    module = sys.argv.pop(1)
    die_with_parent(int(sys.argv[3]))
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
