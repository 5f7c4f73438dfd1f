"""uv installs the distributions of a clone together, by their folders."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.packaging.conftest import REPOSITORY
from tests.unit.docs.page_commands import all_commands, folders_of

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


INSTALLED = {
    tuple(folders): str(command)
    for command in all_commands()
    if "uv pip install" in command.normal
    and (folders := folders_of(command))
    and all((REPOSITORY / folder.partition("[")[0]).exists() for folder in folders)
}
"""The folders that a command of a page or of a Dockerfile installs together, and the first such command."""


def test_the_commands_of_every_platform_are_among_them():
    named = {folder.partition("[")[0].removeprefix("./platforms/") for folders in INSTALLED for folder in folders}
    assert named >= {path.parent.name for path in REPOSITORY.glob("platforms/*/pyproject.toml")}


@pytest.mark.parametrize("folders", INSTALLED, ids=lambda folders: " ".join(folders))
def test_folders_of_a_command_of_the_pages_resolve(folders, tmp_path):
    names = {project_name(folder.partition("[")[0]) for folder in folders}
    assert resolve(tmp_path, *folders) == names, INSTALLED[folders]


def project_name(folder):
    return tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]["name"]


def test_every_distribution_of_the_repository_can_be_requested(tmp_path):
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] for folder in MEMBERS]
    assert resolve(tmp_path, ".", *MEMBERS) == {"mvllm", *projects}
    # uv reports a distribution that is missing here while it resolves a package that requires it.
    assert set(WORKSPACE["sources"]) == {"mvllm", *projects}
