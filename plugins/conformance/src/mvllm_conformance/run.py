"""Runs the conformance suite with pytest, for `mvllm conformance`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.plugin_api import ConfigError, install_command

PLUGIN = "mvllm.testing.plugin"
SUITE = "mvllm.testing.suite"
NEEDED = ("pytest", "torch")


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Attributes:
        platform: The platform's name; None for the only available one.
        report: File for the JSON report.
        waivers: File with the waivers.
        only: Families or clauses, separated by commas.
        quick: Run fewer cases of each grid.
        pytest_arguments: Additional arguments for pytest.
        without_device: Test only clauses that need no device.
        timeout: Seconds that a test may take; None for the suite's limit.
        start_timeout: Seconds that `init_device`, `communicator` and each phase of an engine's start may take; None for
            the suite's limit.
    """

    platform: str | None = None
    report: Path | None = None
    waivers: Path | None = None
    only: str | None = None
    quick: bool = False
    pytest_arguments: Sequence[str] = ()
    without_device: bool = False
    timeout: float | None = None
    start_timeout: float | None = None


def arguments(settings: Settings) -> list[str]:
    """pytest's arguments. The run uses no pytest configuration of the current folder."""
    here = Path(__file__).parent
    found = [
        *("-c", str(here / "pytest.ini")),
        *("--rootdir", str(here / "suite")),
        "--noconftest",  # else pytest loads those of the current folder
        *("-p", "no:cacheprovider"),
        *("-p", PLUGIN),
        *("--pyargs", SUITE),
    ]
    for name in ("platform", "report", "waivers", "only", "timeout", "start_timeout"):
        value = getattr(settings, name)
        if value is not None:
            text = str(Path(value).absolute() if name in ("report", "waivers") else value)
            found += [f"--mvllm-{name.replace('_', '-')}", text]
    flags = {"--mvllm-quick": settings.quick, "--mvllm-without-device": settings.without_device}
    return [*found, *(flag for flag, given in flags.items() if given), *settings.pytest_arguments]


def run(settings: Settings) -> int:
    """Runs the suite; returns pytest's exit status, 0 if no test failed.

    Raises:
        ConfigError: pytest or torch is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The conformance suite needs {' and '.join(missing)}. Run: {install_command(*missing)}"
            + (", with the build of torch that your platform needs" if "torch" in missing else "")
        )
    # The suite makes its checkpoints itself and needs no network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import pytest

    return int(pytest.main(arguments(settings)))
