"""Distributions that exist for a test: a folder with code and metadata, put on the module search path.

Processes that the engine starts have the search path of their parent, so they find the same plugins.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULT_SOURCE = ROOT / "plugins" / "fault-injection" / "src"


def write_metadata(folder: Path, name: str, entry_points: str) -> Path:
    """Makes `folder` the home of an installed distribution `name`."""
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


def fault_platform_path(folder: Path) -> list[str]:
    """What to put on the search path so that mvllm-fault-injection is installed."""
    metadata = write_metadata(
        folder, "mvllm-fault-injection", "[mvllm.platforms]\nfaulty = mvllm_fault_injection.plugin\n"
    )
    return [str(metadata), str(FAULT_SOURCE)]


def puppet_platform_path(folder: Path) -> list[str]:
    """The same for the platform whose worker does what the arguments of its methods say."""
    metadata = write_metadata(folder, "mvllm-puppet", "[mvllm.platforms]\npuppet = tests.helpers.puppet\n")
    return [str(metadata), str(ROOT)]


def late_platform_path(folder: Path) -> list[str]:
    """The same for the platform whose device gives its results late."""
    metadata = write_metadata(folder, "mvllm-late-device", "[mvllm.platforms]\nlate = tests.helpers.late_plugin\n")
    return [str(metadata), str(FAULT_SOURCE), str(ROOT)]


def prepend(monkeypatch: pytest.MonkeyPatch, paths: list[str]) -> None:
    for path in reversed(paths):
        monkeypatch.syspath_prepend(path)
