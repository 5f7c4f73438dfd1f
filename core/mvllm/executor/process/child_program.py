"""The program of every process of an engine: `python -m ... <module> <name> <control socket> <parent pid>`.

It promises to die with its parent before it imports the module whose `main` it runs. Imports take seconds, minutes on a
busy machine, and nobody else would end a process whose parent is killed meanwhile.
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
