"""The environments of clients: one per client, made from its file in `requirements/` when a test first needs it.

    requirements/NAME.txt           a virtual environment: every package that the client needs, with its version
    requirements/NAME/package.json  a folder with node_modules; with package-lock.json, unless it names all there is

They are kept in build/clients, or in the folder that the variable CLIENTS_FOLDER names, until their file changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_SECONDS = 540
REQUIRED = "CLIENTS_REQUIRED"
"""Variable with which a client that cannot be installed is a failure; `ci/matrix.py run clients` sets it."""


class NotInstalled(Exception):
    """A client cannot be installed on this machine; the message says why."""


def folder_of(name: str) -> Path:
    """Folder of a client's environment."""
    return Path(os.environ.get("CLIENTS_FOLDER") or ROOT / "build" / "clients") / name


def python_environment(name: str) -> Path:
    """The interpreter of a client's environment, which is created if it is missing or its requirements changed.

    Raises:
        NotInstalled: pip has failed.
    """
    folder, requirements = folder_of(name), REQUIREMENTS / f"{name}.txt"
    python = folder / "bin" / "python"
    if _is_new(folder, requirements):
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        # The file names every package, so pip has nothing to resolve. Some have no wheel and are built.
        pip = (str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--no-deps")
        _run([*pip, "--prefer-binary", "-r", str(requirements)])
        _finish(folder, requirements)
    return python


def node_environment(name: str) -> Path:
    """The folder of a client for Node.js, with its packages in node_modules.

    Raises:
        NotInstalled: There is no npm, or it has failed.
    """
    folder, requirements = folder_of(name), REQUIREMENTS / name / "package.json"
    lock = requirements.with_name("package-lock.json")
    requirements = lock if lock.exists() else requirements
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NotInstalled("there is no node and npm on this machine")
    if _is_new(folder, requirements):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(REQUIREMENTS / name, folder)
        command = "ci" if lock.exists() else "install"
        _run(["npm", command, "--no-audit", "--no-fund", "--loglevel", "error"], cwd=folder)
        _finish(folder, requirements)
    return folder


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    try:
        ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise NotInstalled(f"{command[0]} took longer than {INSTALL_SECONDS} s") from e
    if ran.returncode:
        lines = [line for line in (ran.stdout + ran.stderr).splitlines() if "error" in line.lower()]
        raise NotInstalled(" ".join(lines[:3]) or f"{command[0]} failed with exit status {ran.returncode}")


def _is_new(folder: Path, requirements: Path) -> bool:
    stamp = folder / "stamp"
    return not stamp.is_file() or stamp.read_text(encoding="utf-8") != _hash(requirements)


def _finish(folder: Path, requirements: Path) -> None:
    (folder / "stamp").write_text(_hash(requirements), encoding="utf-8")


def _hash(requirements: Path) -> str:
    """Of the requirements without comments, and the version of Python."""
    lines = [line for line in requirements.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return hashlib.sha256("\n".join([sys.version, *lines]).encode()).hexdigest()
