"""Probe of the MLX platform: it is available if MLX and torch are installed. Imports neither."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys

from mvllm.plugin_api import DeviceInfo, ProbeResult, install_command


def probe() -> ProbeResult:
    """Looks for MLX and torch, and describes the machine."""
    for module, package in (("mlx", "mlx" if sys.platform == "darwin" else "mlx[cpu]"), ("torch", "torch")):
        if importlib.util.find_spec(module) is None:
            return ProbeResult(
                available=False,
                reason=f"{module} is not installed in this environment.",
                remedy=f"Run: {install_command(package)}",
            )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = DeviceInfo(index=0, name=f"MLX on {platform.machine()} ({device_kind()})", memory_bytes=memory)
    return ProbeResult(available=True, reason=device.name, devices=(device,))


def device_kind() -> str:
    """`gpu` on Apple silicon, else `cpu`."""
    return "gpu" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"
