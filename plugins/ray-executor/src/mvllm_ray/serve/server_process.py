"""The process of a replica's server: `python -m mvllm_ray.serve.server_process PARENT ARGUMENT ...`.

It asks the kernel for SIGTERM when its parent ends, and becomes `mvllm ARGUMENT ...`. So the server ends in order even
if the replica is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(arguments: list[str]) -> list[str]:
    """The command line that starts `mvllm` with these arguments, as a child that ends with this process."""
    return [sys.executable, "-m", "mvllm_ray.serve.server_process", str(os.getpid()), *arguments]


def main() -> None:
    """The program. Never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = int(sys.argv[1])
    if os.getppid() != parent:  # it ended before the call above
        sys.exit("The replica that started this server has ended.")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "mvllm.entrypoints.cli.main", *sys.argv[2:]])  # noqa: S606


if __name__ == "__main__":
    main()
