"""The entry points: found by metadata, and imported by every `mvllm serve` without what serves."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from mvllm.entrypoints.cli.main import main

PROGRAM = """
import sys
import mvllm.entrypoints.cli.serve
before = set(sys.modules)
import mvllm_router.serve_models
new = {name.partition(".")[0] for name in set(sys.modules) - before}
new -= {"mvllm", "mvllm_router", *sys.stdlib_module_names}
sys.exit(f"loaded {sorted(new)}" if new else 0)
"""


def test_the_package_has_a_command_and_an_addition_to_serve() -> None:
    points = importlib.metadata.distribution("mvllm-router").entry_points
    assert {(point.group, point.name) for point in points} == {("mvllm.cli", "router"), ("mvllm.serve", "router")}


def test_the_options_of_serve_import_no_library() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_help_of_serve_has_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help=several models"])
    out = capsys.readouterr().out
    assert "--models FILE" in out and "--keep-alive TIME" in out
