"""Plugin distributions for tests: folders with code and metadata, put on the module search path.

Processes that the engine starts have the search path of their parent, so they find the same plugins.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULT_SOURCE = ROOT / "plugins" / "fault-injection" / "src"
EXAMPLE_SOURCE = ROOT / "plugins" / "example-device" / "src"
NULL_SOURCE = ROOT / "plugins" / "null-device" / "src"
SQLITE_SOURCE = ROOT / "plugins" / "example-kv-connector" / "src"


def write_metadata(folder: Path, name: str, entry_points: str) -> Path:
    """Writes the metadata of an installed distribution `name` to `folder`."""
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return folder


def fault_platform_path(folder: Path) -> list[str]:
    """Search path entries that install mvllm-fault-injection."""
    metadata = write_metadata(
        folder, "mvllm-fault-injection", "[mvllm.platforms]\nfaulty = mvllm_fault_injection.plugin\n"
    )
    return [str(metadata), str(FAULT_SOURCE), str(EXAMPLE_SOURCE)]


def example_platform_path(folder: Path) -> list[str]:
    """Search path entries of mvllm-example-device, compiled in its source folder (an editable install)."""
    library = EXAMPLE_SOURCE / "mvllm_example_device" / "_device.so"
    assert library.exists(), f"{library} is not there: `python3 ci/dev.py setup` compiles it"
    metadata = write_metadata(
        folder, "mvllm-example-device", "[mvllm.platforms]\nexample = mvllm_example_device.plugin\n"
    )
    return [str(metadata), str(EXAMPLE_SOURCE)]


def null_platform_path(folder: Path) -> list[str]:
    """Search path entries of mvllm-null-device."""
    metadata = write_metadata(folder, "mvllm-null-device", "[mvllm.platforms]\nnull = mvllm_null_device.plugin\n")
    return [str(metadata), str(NULL_SOURCE)]


def sqlite_connector_path(folder: Path) -> list[str]:
    """Search path entries of mvllm-example-kv-connector, whose connector is `sqlite`."""
    points = "[mvllm.kv_connectors]\nsqlite = mvllm_example_kv_connector:SQLiteConnector\n"
    return [str(write_metadata(folder, "mvllm-example-kv-connector", points)), str(SQLITE_SOURCE)]


def timed_platform_path(folder: Path) -> list[str]:
    """Search path entries of the platform in timed_device.py."""
    metadata = write_metadata(folder, "mvllm-timed-device", "[mvllm.platforms]\ntimed = tests.helpers.timed_device\n")
    return [str(metadata), str(NULL_SOURCE), str(ROOT)]


def scripted_platform_path(folder: Path) -> list[str]:
    """Search path entries of the platform in scripted_worker.py."""
    metadata = write_metadata(folder, "mvllm-scripted", "[mvllm.platforms]\nscripted = tests.helpers.scripted_worker\n")
    return [str(metadata), str(ROOT)]


def late_platform_path(folder: Path) -> list[str]:
    """Search path entries of the platform in late_device.py."""
    metadata = write_metadata(folder, "mvllm-late-device", "[mvllm.platforms]\nlate = tests.helpers.late_plugin\n")
    return [str(metadata), str(FAULT_SOURCE), str(EXAMPLE_SOURCE), str(ROOT)]


def prepend(monkeypatch: pytest.MonkeyPatch, paths: list[str]) -> None:
    for path in reversed(paths):
        monkeypatch.syspath_prepend(path)


def multi_device_platform_path(folder: Path) -> list[str]:
    """Search path entries of the platform in multi_device_platform.py."""
    metadata = write_metadata(
        folder, "mvllm-several", "[mvllm.platforms]\nseveral = tests.helpers.multi_device_plugin\n"
    )
    return [str(metadata), str(ROOT)]
