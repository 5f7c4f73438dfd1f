"""Plugin module of the platform `late`; see tests.helpers.late_device."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl

LOG = "LATE_DEVICE_LOG"
"""Environment variable with the file in which workers log their steps."""

SPEC = PlatformSpec(
    name="late",
    vendor="tests",
    contract=(1, 1),
    probe="tests.helpers.late_plugin:probe",
    factory="tests.helpers.late_device:LatePlatform",
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(LOG in os.environ, f"{LOG} is set or not", remedy=f"set {LOG}")


def read_log(path: Path) -> dict[int, list[tuple[str, int]]]:
    """The log of each rank: (event, step), in order."""
    found: dict[int, list[tuple[str, int]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        rank, event, step = line.split()
        found.setdefault(int(rank), []).append((event, int(step)))
    return found
