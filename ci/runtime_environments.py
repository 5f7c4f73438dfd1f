"""Environments of platforms whose runtime .venv does not have: the packages of .venv, and that runtime.

    python3 ci/dev.py conform mlx         in .venv-mlx
    python3 ci/dev.py conform openvino    in .venv-openvino

Such an environment takes the space of the runtime only. It is created again if the platform's requirements or the pins
have changed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from environments import UNFINISHED, Environment, Stamp, Steps, only_one

OTHER_REQUIREMENTS = ("mvllm", "torch")
"""What .venv has: of the platform's requirements, all others are installed."""


def runtime_environment(main: Environment, platform: Path) -> Environment:
    """The environment of a platform; it may not exist yet.

    Args:
        main: The environment with everything but the runtime.
        platform: The platform's folder.
    """
    return Environment(main.root, main.root / f".venv-{platform.name}")


def setup(main: Environment, platform: Path) -> Environment:
    """Creates the environment of a platform, if it is missing or out of date.

    Raises:
        StepFailed: A command failed.
    """
    lane = runtime_environment(main, platform)
    constraints = [main.root / "ci" / "constraints" / f"{name}.txt" for name in ("cpu", "runtimes")]
    wanted = Stamp(lane.hash_of([platform / "pyproject.toml", *constraints]))
    with only_one():
        if lane.read_stamp() == wanted and lane.has(("python",)):
            return lane
        print(
            f"Creating the environment in {lane.folder}: the packages of {main.folder.name}, and a runtime", flush=True
        )
        lane.remove()
        lane.write_stamp(UNFINISHED)
        steps = Steps(lane, total=2)
        steps.run(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", lane.folder])
        packages = "lib/python{}.{}/site-packages".format(*sys.version_info[:2])
        (lane.folder / packages).mkdir(parents=True, exist_ok=True)
        # `addsitedir` also reads the .pth files of editable installs.
        line = f"import site; site.addsitedir({str(main.folder / packages)!r})\n"
        (lane.folder / packages / "packages_of_the_main_environment.pth").write_text(line)
        pip = [lane.python, "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
        pins = [word for file in constraints for word in ("-c", file)]
        steps.run(f"the runtime of {platform.name}", [*pip, *pins, *requirements(platform)])
        lane.write_stamp(wanted)
    return lane


def requirements(platform: Path) -> list[str]:
    """The platform's requirements without those that the main environment has."""
    project = tomllib.loads((platform / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each for each in project["dependencies"] if not each.startswith(OTHER_REQUIREMENTS)]
