"""Environments and temporary distributions for the packaging tests.

One virtual environment, made once and kept in pytest's cache, holds the *built wheel* of the core, its requirements and
pytest, but neither torch nor a platform. A platform plugin is then only a folder on PYTHONPATH with a `.dist-info`
inside, which takes a millisecond to make instead of a pip installation.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "ci" / "constraints" / "cpu.txt"


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
        wanted = sources_hash()
        if not stamp.exists() or stamp.read_text().split()[0] != requirements_hash():
            venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(folder)
            stamp.unlink(missing_ok=True)
        wheels = sorted((cache / "wheels").glob("*.whl"))
        if not stamp.exists() or stamp.read_text().split()[1] != wanted or not wheels:
            for old in wheels:
                old.unlink()
            build_wheel(REPOSITORY, cache / "wheels")
            [wheel] = (cache / "wheels").glob("*.whl")
            install = ["-m", "pip", "install", "-q", "--no-compile", "--progress-bar", "off", "-c", CONSTRAINTS]
            if not stamp.exists():
                run_quietly([folder / "bin" / "python", *install, f"{wheel}[testing]"])
            else:
                run_quietly([folder / "bin" / "python", *install, "--no-deps", "--force-reinstall", wheel])
            stamp.write_text(f"{requirements_hash()} {wanted}\n")
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
    return hashlib.sha256(content).hexdigest()


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
