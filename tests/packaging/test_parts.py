"""The parts of mvllm as packages: wheels from source archives, core without them, with one of them, and with all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import REPOSITORY, link_distributions, load_script, requirements_of
from tests.packaging.wheels import install, link_torch

BUILD = """
import importlib, os, sys, tomllib

for folder, destination, kind in zip(*[iter(sys.argv[1:])] * 3):
    os.chdir(folder)
    with open("pyproject.toml", "rb") as file:
        backend = importlib.import_module(tomllib.load(file)["build-system"]["build-backend"])
    getattr(backend, f"build_{kind}")(destination)
"""
"""Builds in one process what `python -m build` builds in two for each distribution."""
LOAD = """
import json
from importlib.metadata import distributions
from mvllm.entrypoints.cli.main import installed_commands
from mvllm.installable import installable_parts, part_versions

parts = set(installable_parts().values())
for point in [point for each in distributions() if each.name in parts for point in each.entry_points]:
    point.load()
versions = part_versions()
print(json.dumps([[name for name, version in versions.items() if version], sorted(installed_commands())]))
"""

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PARTS = {
    project["name"]: project
    for folder in sorted(REPOSITORY.glob("plugins/*/pyproject.toml"))
    if f"{(project := tomllib.loads(folder.read_text())['project'])['name']}>=0.9,<1"
    in PROJECT["optional-dependencies"]["parts"]
}
COMMANDS = {
    command: name for name, part in PARTS.items() for command in part.get("entry-points", {}).get("mvllm.cli", {})
}

FIRST_COMMANDS = {package: command for command, package in reversed(COMMANDS.items())}
"""One command of each package that has some."""


def mvllm(environment, *arguments, path=(), **options):
    return environment.run("-m", "mvllm", *arguments, path=path, **options)


@pytest.fixture(scope="module")
def projects() -> list[Path]:
    """The distributions that `ci/dev.py build` builds, without core and without those that are compiled."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        dev = load_script(REPOSITORY / "ci" / "dev.py", monkeypatch)
    assert {tomllib.loads((part / "pyproject.toml").read_text())["project"]["name"] for part in dev.PARTS} == set(PARTS)
    return [folder for folder in dev.DISTRIBUTIONS if folder not in (dev.ROOT, dev.PLATFORM)]


@pytest.fixture(scope="module")
def wheels(projects, tmp_path_factory) -> dict[str, Path]:
    """The wheel of each distribution, built from its source archive, which was built from a clean folder."""
    folder = tmp_path_factory.mktemp("distributions")
    names = [project.name for project in projects]
    dirt = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "tests", "_stubs")
    copies = [shutil.copytree(project, folder / "clean" / project.name, ignore=dirt) for project in projects]
    build([(copy, folder / "sdist" / name, "sdist") for name, copy in zip(names, copies, strict=True)])
    unpacked = []
    for name in names:
        [archive] = (folder / "sdist" / name).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder / "unpacked" / name, filter="data")
        unpacked += (folder / "unpacked" / name).iterdir()
    build([(source, folder / "wheel" / name, "wheel") for name, source in zip(names, unpacked, strict=True)])
    found = [wheel for name in names for wheel in (folder / "wheel" / name).glob("*.whl")]
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in found}


def build(tasks) -> None:
    for _, destination, _ in tasks:
        destination.mkdir(parents=True)
    words = [str(word) for task in tasks for word in task]
    done = subprocess.run([sys.executable, "-c", BUILD, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> dict[str, list[Path]]:
    """For each part the folders that install it, with torch and everything else that it requires but core."""
    folder = tmp_path_factory.mktemp("installed")
    torch = link_torch(folder / "torch")
    (folder / "required").mkdir()
    for name in PARTS:
        required = [text for text in requirements_of(wheels[name]) if not text.startswith("mvllm")]
        link_distributions(required, folder / "required")
    return {name: [install(folder / name, wheels[name]), folder / "required", torch] for name in PARTS}


def test_every_distribution_builds_from_a_clean_folder(projects, wheels):
    assert len(wheels) == len(projects) > len(PARTS) > 4
    for project in projects:
        [package] = (init.parent for init in (project / "src").glob("*/__init__.py"))
        name = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
        assert wheels[name].name.endswith("-py3-none-any.whl"), name
        held = set(zipfile.ZipFile(wheels[name]).namelist())
        files = (file for suffix in ("py", "tmpl") for file in package.rglob(f"*.{suffix}"))
        sources = {str(file.relative_to(project / "src")) for file in files}
        assert held >= {*sources, f"{package.name}/py.typed"}, name


@pytest.mark.parametrize("command", FIRST_COMMANDS.values())
def test_a_command_whose_package_is_missing_names_it(core_only, command):
    done = mvllm(core_only, command, "--help")
    package = COMMANDS[command]
    part = package.removeprefix("mvllm-")
    wanted = f"error: `mvllm {command}` needs the package {package}, which is not installed. Run: "
    assert done.returncode == 1 and done.stderr.startswith(wanted) and "-r WHEELHOUSE/" in done.stderr
    assert PROJECT["optional-dependencies"][part] == [f"{package}>=0.9,<1"]


def test_doctor_names_the_missing_parts(core_only):
    names = sorted(name.removeprefix("mvllm-") for name in PARTS)
    line = f"none; not installed: {', '.join(names)}. To install: "
    checks = json.loads(mvllm(core_only, "doctor", "--json").stdout)["checks"]
    [found] = [check["found"] for check in checks if check["id"] == "core.parts"]
    assert found.startswith(line) and "-r WHEELHOUSE/" in found


@pytest.mark.parametrize("chosen", [*([name] for name in PARTS), list(PARTS)], ids=lambda chosen: "+".join(chosen))
def test_parts_are_found_in_any_combination(core_only, installed, chosen):
    path = list(dict.fromkeys(folder for name in chosen for folder in installed[name]))
    parts, commands = json.loads(core_only.evaluate(LOAD, path=path))
    assert parts == sorted(name.removeprefix("mvllm-") for name in chosen)
    assert commands == sorted(command for command, name in COMMANDS.items() if name in chosen)
    for command in sorted(set(FIRST_COMMANDS.values()) & set(commands)):
        done = mvllm(core_only, command, "--help", path=path)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: mvllm {command} "), done.stderr
