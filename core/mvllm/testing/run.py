"""Runs the suite for those who need not know pytest."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.errors import ConfigError

PLUGIN = "mvllm.testing.plugin"
SUITE = "mvllm.testing.suite"
NEEDED = ("pytest", "torch")


@dataclass(frozen=True)
class Settings:
    """What is to be run.

    Attributes:
        platform: The platform's name; None for the only available one.
        report: Where the JSON report goes.
        waivers: The file of waivers.
        only: Families or clauses, separated by commas.
        quick: Thin out the grids.
        further: Arguments for pytest.
        without_device: Examine only what opens no device.
    """

    platform: str | None = None
    report: Path | None = None
    waivers: Path | None = None
    only: str | None = None
    quick: bool = False
    further: Sequence[str] = ()
    without_device: bool = False


def arguments(settings: Settings) -> list[str]:
    """pytest's arguments for a run that takes nothing from the folder that it is started in."""
    here = Path(__file__).parent
    found = [
        *("-c", str(here / "pytest.ini")),
        *("--rootdir", str(here / "suite")),
        "--noconftest",  # pytest would take one of this folder, or of a folder of tests in it
        *("-p", "no:cacheprovider"),
        *("-p", PLUGIN),
        *("--pyargs", SUITE),
    ]
    for name in ("platform", "report", "waivers", "only"):
        value = getattr(settings, name)
        if value is not None:
            found += [f"--mvllm-{name}", str(value if name in ("platform", "only") else Path(value).absolute())]
    flags = {"--mvllm-quick": settings.quick, "--mvllm-without-device": settings.without_device}
    return [*found, *(flag for flag, given in flags.items() if given), *settings.further]


def run(settings: Settings) -> int:
    """Runs the suite; returns 0 when nothing failed.

    Raises:
        ConfigError: What the suite needs is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The conformance suite needs {' and '.join(missing)}. Run: pip install 'mvllm[testing]'"
            + (" and the torch of your platform's package" if "torch" in missing else "")
        )
    # Checkpoints are made here, and nothing is looked up.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import pytest

    return int(pytest.main(arguments(settings)))
