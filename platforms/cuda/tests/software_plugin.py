"""Plugin module of the platform `software`: see software_platform.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl
from mvllm_cuda.plugin import SPEC as CUDA
from tests.helpers.plugins import EXAMPLE_SOURCE, ROOT, write_metadata

SPEC = dataclasses.replace(
    CUDA,
    name="software",
    probe="platforms.cuda.tests.software_plugin:probe",
    factory="platforms.cuda.tests.software_platform:SoftwarePlatform",
    by_name_only=True,
    torch_backend="example",
)
MEMORY = 1 << 30
"""Bytes of the device."""


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "one device", (DeviceInfo(0, "host memory", MEMORY),))


def path(folder: Path) -> list[str]:
    """Entries of the module search path that install the plugin."""
    entry = "[mvllm.platforms]\nsoftware = platforms.cuda.tests.software_plugin\n"
    return [str(write_metadata(folder, "mvllm-software", entry)), str(EXAMPLE_SOURCE), str(ROOT)]
