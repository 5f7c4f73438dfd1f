"""Probe of the OpenVINO platform: available if OpenVINO and torch are installed. Imports neither."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata

from mvllm.plugin_api import DeviceInfo, ProbeResult, install_command

FLOOR = (2026, 4)
"""First release with the operations that this platform uses."""


def probe() -> ProbeResult:
    """Looks for the installed packages and describes the processor."""
    missing = [name for name in ("openvino", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        remedy = f"Run: {install_command(*missing)}"
        return ProbeResult(False, f"{' and '.join(missing)} not installed in this environment.", remedy=remedy)
    version = metadata.version("openvino")
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
        needed = ".".join(map(str, FLOOR))
        return ProbeResult(
            False,
            f"OpenVINO is {version}; {needed} is needed.",
            remedy=f"Run: {install_command(f'openvino>={needed}')}",
        )
    device = DeviceInfo(0, f"{platform.machine()} processor", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return ProbeResult(True, f"{device.name}, through OpenVINO {version}", (device,))
