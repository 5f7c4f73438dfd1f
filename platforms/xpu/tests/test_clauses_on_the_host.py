"""Clauses of the conformance suite on the platform's own runtime and graphs, with the host as its device.

The whole suite can run there in minutes: `mvllm conformance --platform hosted-xpu-sdpa` with the folders of
`hosted_plugin.path` on PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from platforms.xpu.tests import hosted_plugin

MAIN = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("mode", "clauses", "passed"),
    [
        ("graphs", "MEM,GRF", r"8 passed, 1 not claimed"),  # several devices of one process
        pytest.param("none", "MEM,GRF", r"\d passed, \d not claimed", marks=pytest.mark.exhaustive),
        pytest.param("graphs", "STA", r"7 passed", marks=pytest.mark.exhaustive),
    ],
)
def test_clauses_of_memory_graphs_and_states_pass(tmp_path, mode, clauses, passed):
    foreign = ("ZE_", "ONEAPI_", "MVLLM_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    path = os.pathsep.join([*hosted_plugin.path(tmp_path / "site"), *filter(None, sys.path)])
    due = ["--only", clauses, "--quick", "--", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "conformance", "--platform", "hosted-xpu-sdpa", *due],
        env={**kept, "PYTHONPATH": path, "MVLLM_XPU_COMPILE": mode},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(rf"platform hosted-xpu-sdpa: {passed}", done.stdout), done.stdout[-1000:]
