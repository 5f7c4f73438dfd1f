"""Probe of the ROCm platform: reads the driver's and torch's files without loading torch or HIP."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm.plugin_api import DeviceInfo, ProbeResult
from mvllm_rocm import targets, visible_devices
from mvllm_rocm.topology import read_inventory
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.device_discovery import TopologyError
from mvllm_torch_gpu.message_text import counted, sentence

_SEE = ", see torch's installation page"
_OTHER_TORCH = f"Install torch's build for ROCm in its place{_SEE}; then reinstall mvllm-rocm."


def probe(root: Path | None = None) -> ProbeResult:
    """Checks that there are a driver, visible devices, and a torch that can use them.

    Args:
        root: Root folder of the files.
    """
    try:
        inventory = read_inventory(root)
    except TopologyError as e:
        return ProbeResult(False, sentence(str(e)), remedy=e.remedy)
    if not inventory.devices:
        nothing = "; ".join(inventory.failures) or "the driver finds no device"
        remedy = (
            "Run rocminfo: it must list a device. The user must be in the groups render and video; a container must be "
            "started with --device=/dev/kfd --device=/dev/dri."
        )
        return ProbeResult(False, sentence(nothing), remedy=remedy)
    seen = visible_devices.resolve(inventory, os.environ)
    if not seen.devices:
        return ProbeResult(False, sentence(seen.problem or "no device is visible"), remedy=seen.remedy)
    devices = tuple(
        DeviceInfo(i, f"{device.name} ({device.target})", device.memory_bytes) for i, device in enumerate(seen.devices)
    )
    if not any(targets.is_supported(device.target) for device in seen.devices):
        first = seen.devices[0]
        reason = f"{first.name} is a {first.target}, needed is {targets.NEEDED}."
        return ProbeResult(False, reason, devices, "Use a newer device, or another platform.")
    if problem := torch_problem():
        return ProbeResult(False, problem[0], devices, problem[1])
    found = f"{counted([device.name for device in devices])}, driver {inventory.driver_version or 'of the kernel'}"
    if seen.problem:
        found += f"; {seen.problem}"
    return ProbeResult(True, found, devices)


def torch_problem() -> tuple[str, str] | None:
    """Why the installed torch cannot use such devices, and what to do; None if it can."""
    build = torch_build.find()
    if build is None:
        return "torch is not installed in this environment.", f"Install its build for ROCm{_SEE}."
    if build.hip is None:
        return f"torch {build.version} was built for {build.kind}, not for ROCm.", _OTHER_TORCH
    return None
