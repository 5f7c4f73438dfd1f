"""A file of tests again, in a process that is told to run with another instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

once_each = pytest.mark.skipif("MVLLM_CPU_ISA" in os.environ, reason="runs this file once per instruction set already")


def run_again(file: str, isa: str, attribute: str = "isa") -> None:
    """Passes if `file` does with the instruction set forced; skips where the processor does not have it.

    Args:
        file: The file of tests.
        isa: As `MVLLM_CPU_ISA` takes it.
        attribute: Of the opened kernels: where they say what they run with.
    """
    env = dict(os.environ, MVLLM_CPU_ISA=isa)
    ask = f"from mvllm_cpu import kernels; print(kernels.load().{attribute})"
    runs = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    if runs.stdout.strip() != isa:
        pytest.skip(f"this processor has no {isa}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
