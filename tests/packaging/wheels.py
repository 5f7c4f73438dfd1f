"""Third-party platform plugins for tests, as real wheels that are unpacked into a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from mvllm.plugin_api import CONTRACT
from tests.packaging.conftest import link_distributions

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "{version}"
dependencies = {requires}

[project.entry-points."{group}"]
{name} = "{entry_point}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""

PLUGIN = """
from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl
{first_line}

@hookimpl
def mvllm_platform():
    return PlatformSpec(
        name={name!r},
        vendor="Acme",
        contract={contract!r},
        probe="{package}.plugin:probe",
        factory="{package}.device:make_platform",
        {spec}
    )

def probe():
    {probe}
    return ProbeResult(True, "1 device")
"""

DEVICE = """
from mvllm.plugin_api import LaunchTopology, Platform
{device_line}

class AcmePlatform(Platform):
    spec = capabilities = None
    plan = init_device = communicator = attention_backend = None

    def topology(self, parallel):
        return LaunchTopology(1, 1, ("uni",), device_variable="ACME_CHIPS")

def make_platform():
    return AcmePlatform()
"""


def build(project: Path) -> Path:
    """The wheel of a project whose build backend is hatchling."""
    return Path(next(iter(WheelBuilder(str(project)).build(directory=str(project / "dist"), versions=["standard"]))))


def build_part(project: Path, folder: Path) -> Path:
    """The wheel of a part of mvllm, whose build backend is setuptools, from a copy of its folder."""
    copy = shutil.copytree(project, folder / "project", ignore=shutil.ignore_patterns("build", "*.egg-info", "tests"))
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def plugin_wheel(
    folder: Path,
    name="acme",
    *,
    distribution=None,
    version="1.2.3",
    contract=CONTRACT,
    requires=(),
    first_line="",
    spec="",
    probe="pass",
    device_line="",
    entry_point=None,
) -> Path:
    """A wheel with an available platform; the keywords change parts of it."""
    distribution = distribution or f"mvllm-{name}"
    package = distribution.replace("-", "_")
    values = {key: value for key, value in locals().items() if key not in ("folder", "requires")}
    values |= {"entry_point": entry_point or f"{package}.plugin", "group": "mvllm.platforms"}
    project = folder / f"{distribution}-{version}"
    write(project, "pyproject.toml", PROJECT.format(requires=json.dumps(list(requires)), **values))
    write(project, f"{package}/__init__.py", "")
    write(project, f"{package}/plugin.py", PLUGIN.format(**values))
    write(project, f"{package}/device.py", DEVICE.format(**values))
    return build(project)


def library_wheel(folder: Path, distribution: str, version: str, code: str, *, autoload: bool = False) -> Path:
    """A wheel with one module; with `autoload`, torch calls its function `start` when torch is imported."""
    package = distribution.replace("-", "_")
    project = folder / f"{distribution}-{version}"
    text = PROJECT.format(
        distribution=distribution,
        version=version,
        requires="[]",
        group="torch.backends" if autoload else "nobody.asks",
        name=package,
        entry_point=f"{package}:start",
        package=package,
    )
    write(project, "pyproject.toml", text)
    write(project, f"{package}/__init__.py", code)
    return build(project)


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(folder: Path, *wheels: Path) -> Path:
    """Unpacks the wheels into `folder`, to be put on a search path: what pip does with wheels of Python files.

    Two of them may contain the same file, as two distributions of one environment may; the last one's file stays.
    """
    folder.mkdir(exist_ok=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            assert not any(".data/" in name for name in archive.namelist()), "pip distributes these files"
            archive.extractall(folder)
    return folder


def link_torch(folder: Path) -> Path:
    """Links torch of this environment and its requirements, and nothing else, into `folder`."""
    folder.mkdir()
    link_distributions(["torch"], folder)
    return folder
