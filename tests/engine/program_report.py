"""Writes the state of its own process as JSON, and that of a child with the remaining arguments, if there are any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MODULE = "tests.engine.program_report"


def nul_separated(name: str) -> list[str]:
    return [part for part in Path(f"/proc/self/{name}").read_text().split("\0") if part]


def main() -> None:
    report = {
        "arguments": sys.argv[1:],
        "command": nul_separated("cmdline"),
        "shown variables": nul_separated("environ"),
        "variable": os.environ.get("REPORT"),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "pid": os.getpid(),
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "input": sys.stdin.read(),
        "is forked": "torch" in sys.modules,
    }
    if sys.argv[1:]:
        command = [sys.executable, "-m", MODULE, *sys.argv[2:]]
        report["child"] = json.loads(subprocess.run(command, input="", capture_output=True, text=True).stdout)
    print(json.dumps(report))
    print("to stderr", file=sys.stderr)
    sys.exit(7)


if __name__ == "__main__":
    main()
