"""Environments and temporary distributions for the packaging tests.

One virtual environment, made once and kept in pytest's cache, holds the *built wheel* of the core, its requirements and
pytest, but neither torch nor a platform. The requirements are links to the distributions of the environment that runs
the tests, which are compiled already. A platform plugin is then only a folder on PYTHONPATH with a `.dist-info` inside,
which takes a millisecond to make instead of a pip installation.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "ci" / "constraints" / "cpu.txt"
TOOLS = ("pip", "hypothesis", "pytest", "pytest-timeout")
"""What the tests of the core run with."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which tests run programs."""

    folder: Path
    wheel: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments, path=(), cwd=None, timeout=120, **variables) -> subprocess.CompletedProcess[str]:
        """Runs this environment's Python with `arguments`; only the folders of `path` are added to its search path."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            env={**kept, **variables},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def evaluate(self, program: str, **options) -> str:
        """Runs a program that must succeed; returns its output."""
        done = self.run("-c", textwrap.dedent(program), **options)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


@pytest.fixture(scope="session")
def core_only(request) -> Environment:
    """The core's wheel with its requirements and pytest; no torch, no platform."""
    cache = request.config.cache.mkdir("core-only")
    folder, stamp = cache / "venv", cache / "venv" / "sources.sha256"
    with locked(cache / "lock"):
        required, sources = requirements_hash(), sources_hash()
        made_from = stamp.read_text().split() if stamp.exists() else [None]
        wheels = sorted((cache / "wheels").glob("*.whl"))
        if made_from != [required, sources] or len(wheels) != 1:
            stamp.unlink(missing_ok=True)
            for old in wheels:
                old.unlink()
            wheel = build_wheel(REPOSITORY, cache / "wheels")
            if made_from[0] != required:
                venv.EnvBuilder(clear=True, symlinks=True).create(folder)
                link_distributions([*TOOLS, *requirements_of(wheel)], site_packages(folder))
            pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
            run_quietly([*pip, "--no-compile", "--no-deps", "--no-index", "--force-reinstall", wheel])
            stamp.write_text(f"{required} {sources}\n")
        [wheel] = (cache / "wheels").glob("*.whl")
    return Environment(folder, wheel)


def load_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads a script of ci/ as a module, with its folder on the search path. Replaces modules of the same names that
    were loaded before."""
    monkeypatch.syspath_prepend(path.parent)
    for neighbour in path.parent.glob("*.py"):
        monkeypatch.delitem(sys.modules, neighbour.stem, raising=False)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def locked(path: Path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def requirements_hash() -> str:
    content = CONSTRAINTS.read_bytes() + (REPOSITORY / "pyproject.toml").read_bytes() + sys.version.encode()
    return hashlib.sha256(content + sys.prefix.encode()).hexdigest()


def requirements_of(wheel: Path) -> list[str]:
    """The requirements in a wheel's metadata, without those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        required = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")
    markers = [(text, Requirement(text).marker) for text in required]
    return [text.partition(";")[0] for text, marker in markers if marker is None or marker.evaluate({"extra": ""})]


def site_packages(folder: Path) -> Path:
    """The folder for packages of a virtual environment of this Python."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def link_distributions(required: list[str], folder: Path, *, copy_metadata: bool = False) -> None:
    """Links the distributions of this environment that satisfy `required`, and their requirements, into `folder`.

    As an installation by pip would, it fails for a requirement that no installed distribution satisfies. With
    `copy_metadata` the folders of metadata are copies.
    """
    waiting, seen = [Requirement(text) for text in required], set[tuple[str, frozenset[str]]]()
    while waiting:
        requirement = waiting.pop()
        found = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), f"{requirement}: it is {found.version}"
        if (key := (found.name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if (folder / top).exists():
                continue
            if copy_metadata and top.endswith(".dist-info"):
                shutil.copytree(str(found.locate_file(top)), folder / top)
            else:
                (folder / top).symlink_to(found.locate_file(top))
        for each in map(Requirement, found.requires or ()):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(each)


def sources_hash() -> str:
    digest = hashlib.sha256((REPOSITORY / "pyproject.toml").read_bytes())
    for file in sorted((REPOSITORY / "core" / "mvllm").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()


def build_wheel(project: Path, destination: Path) -> Path:
    """Builds one wheel of `project` into `destination` with the build tools of the environment that runs the tests."""
    destination.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run_quietly([*pip, "-w", destination, project])
    return max(destination.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def run_quietly(command) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
