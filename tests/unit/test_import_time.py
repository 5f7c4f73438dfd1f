"""`import mvllm` is fast, and resolving its names imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_SECONDS = 0.3

PROGRAM = """
import sys, time
start = time.perf_counter()
import mvllm
print(time.perf_counter() - start)
sys.exit(f"loaded {sorted(heavy)}" if (heavy := {"torch", "transformers", "numpy"} & set(sys.modules)) else 0)
"""


@pytest.mark.serial
def test_importing_takes_under_0_3_seconds() -> None:
    seconds = []
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
        assert ran.returncode == 0, ran.stderr
        seconds.append(float(ran.stdout))
    assert min(seconds) < LIMIT_SECONDS


def test_the_names_of_the_package_resolve_without_torch() -> None:
    program = "import sys, mvllm\nfor name in mvllm.__all__: getattr(mvllm, name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
