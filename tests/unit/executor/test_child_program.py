"""A child process of an engine ends with its parent, from the start of its program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.helpers.processes import wait_until

PARENT = """
import os, subprocess, sys
program = [sys.executable, "-m", "mvllm.executor.process.child_program"]
command = [*program, "slow_to_import", "Name", "0", str(os.getpid())]
print(subprocess.Popen(command).pid, flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_parent_while_it_imports(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow_to_import.py").write_text(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(begun.exists, 60, "it imports")
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 120, "it is gone")
