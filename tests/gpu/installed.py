"""Makes a working tree importable on a machine where nothing is installed and nothing can be downloaded.

Platform plugins are found by their metadata. Here it is written from their pyproject.toml into a folder, which is put
on the module search path together with the sources; processes that an engine starts inherit both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.gpu.settings import ON_THE_HOST, ROOT
from tests.helpers.plugins import write_metadata

MODULES = {
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "pytest-timeout": "pytest_timeout",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
"""Names of modules that differ from those of their packages."""
SERVE_ONLY = ("httptools", "prometheus-client", "starlette", "uvicorn", "uvloop")
EVERYTHING = "everything"
EXTRAS = ("bench", "testing")
PARTS = {
    requirement.partition(">")[0]
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["parts"]
}


def install(folder: Path, wheels: Path | None, platform: str) -> None:
    """Puts the working tree, and the wheels of a folder, on the path of this process and of those that it starts.

    Args:
        platform: One of ON_THE_HOST has Triton's interpreter, too, in processes that are started from now on.
        folder: Where metadata and unpacked wheels go.
        wheels: Packages that the machine lacks.
    """
    paths = [str(ROOT)]
    for project_file in sorted([*ROOT.glob("platforms/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]):
        project = tomllib.loads(project_file.read_text())["project"]
        if project_file.parts[-3] == "plugins" and project["name"] not in PARTS:
            continue
        paths.append(str(project_file.parent / "src"))
        if _is_installed(project["name"]):
            continue
        entries = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in project.get("entry-points", {}).items()
        )
        write_metadata(folder / "metadata", project["name"], entries)
    entries = "[mvllm.platforms]\n" + "".join(f"{name} = {module}\n" for name, module in ON_THE_HOST.items())
    write_metadata(folder / "metadata", "mvllm-on-the-host", entries)
    paths += [str(ROOT / "core"), str(folder / "metadata")]
    if wheels is not None:
        paths.append(str(_unpack(wheels, folder / "site")))
    for path in reversed(paths):
        if path not in sys.path:
            sys.path.insert(0, path)
    if platform in ON_THE_HOST:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def missing() -> dict[str, str]:
    """Packages that the project needs and this Python has not: by name, what is missing without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for requirement in project["dependencies"]:
        name = _name(requirement)
        if not _can_import(name):
            found[name] = "serving" if name in SERVE_ONLY else EVERYTHING
        elif name in SERVE_ONLY:
            found |= dict.fromkeys(_lacks(name), "serving")
    for extra in EXTRAS:
        for name in map(_name, _requirements(project["optional-dependencies"][extra])):
            if not _can_import(name):
                found[name] = {"bench": "the serving figures", "testing": "conformance"}[extra]
    for name, what in (("torch", EVERYTHING), ("triton", "kernels"), ("httpx2", "serving")):
        if not _can_import(name):
            found[name] = what
    return found


def version(name: str) -> str:
    """Of a package, `not installed`, or where it is without metadata what its module says."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if not _can_import(name):
            return "not installed"
        module: Any = importlib.import_module(MODULES.get(name, name.replace("-", "_")))
        return str(getattr(module, "__version__", "of unknown version"))


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _can_import(name: str) -> bool:
    return importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is not None


def _requirements(extra: list[str]) -> list[str]:
    """What the packages of an extra require that are parts of mvllm, and the others themselves."""
    found = []
    for requirement in extra:
        folder = ROOT / "plugins" / _name(requirement).removeprefix("mvllm-")
        if _name(requirement) in PARTS:
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            found += [each for each in project["dependencies"] if _name(each) != "mvllm"]
        else:
            found.append(requirement)
    return found


def _lacks(name: str) -> list[str]:
    """What a package needs and cannot import: wheels are unpacked without what they need."""
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except ImportError as e:
        return [e.name.partition(".")[0] if e.name else name]
    return []


def _name(requirement: str) -> str:
    for i, letter in enumerate(requirement):
        if letter in " <>=!~[;":
            return requirement[:i]
    return requirement


def _unpack(wheels: Path, folder: Path) -> Path:
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    files = [path for path in found if not Path(path).name.startswith("mvllm")]  # those are for the part `wheels`
    if found and not files:
        return folder
    if not files:
        raise SystemExit(f"--wheels {wheels}: there are no wheels. Put them there, or leave the option away.")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*command, "--target", str(folder), *files], check=True)
    return folder
