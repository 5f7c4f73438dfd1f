"""uv installs the distributions of a clone together, by their folders."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.packaging.conftest import REPOSITORY

WORKSPACE = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["uv"]
MEMBERS = sorted(
    folder
    for pattern in WORKSPACE["workspace"]["members"]
    for folder in REPOSITORY.glob(pattern)
    if (folder / "pyproject.toml").exists()
)


def resolve(tmp_path, *folders):
    """The packages that uv would install, without downloading or building anything; an error of uv fails the test."""
    found = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps", "--offline", "--no-cache"),
            *("--no-build-isolation", "--python", sys.executable, "--target", tmp_path / "target", *folders),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return {line.split()[1] for line in found.stderr.splitlines() if line.startswith(" + ")}


def test_the_command_of_the_readme_resolves(tmp_path):
    assert 'uv pip install --torch-backend=cpu ".[parts]" ./platforms/cpu' in (REPOSITORY / "README.md").read_text()
    assert resolve(tmp_path, ".[parts]", "./platforms/cpu") == {"mvllm", "mvllm-cpu"}


def test_every_distribution_of_the_repository_can_be_requested(tmp_path):
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] for folder in MEMBERS]
    assert resolve(tmp_path, ".", *MEMBERS) == {"mvllm", *projects}
    # uv reports a distribution that is missing here while it resolves a package that requires it.
    assert set(WORKSPACE["sources"]) == {"mvllm", *projects}
