"""Entry point of the workers, engine cores, API servers and the coordinator, which are children of an engine or server:
`python -P -m mvllm.executor.process.child_program <module> <name> <control socket> <parent pid>`.

First it sets the process to end with its parent, then it imports `module` and runs its `main`. Imports take
seconds, so they come second: a process whose parent is killed during the imports must end as well.
"""

from __future__ import annotations

import importlib
import sys

from mvllm.executor.process.process_utils import die_with_parent


def main() -> None:
    """Imports the module named by the first argument and runs its `main`."""
    module = sys.argv.pop(1)
    die_with_parent(int(sys.argv[3]))
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
