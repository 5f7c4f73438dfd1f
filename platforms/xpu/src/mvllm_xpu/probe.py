"""Probe of the XPU platform: reads the kernel's and torch's files without loading torch or Level Zero."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm.plugin_api import DeviceInfo, ProbeResult
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.device_discovery import TopologyError
from mvllm_torch_gpu.message_text import counted, sentence
from mvllm_xpu import chips, compute_runtime, topology, visible_devices
from mvllm_xpu.topology import read_inventory

_SEE = ", see torch's installation page"
_OTHER_TORCH = f"Install torch's build for XPU in its place{_SEE}; then reinstall mvllm-xpu."


def probe(root: Path | None = None) -> ProbeResult:
    """Checks that there are visible devices, the compute runtime, and a torch that can use them.

    Args:
        root: Root folder of the files.
    """
    try:
        inventory = read_inventory(root)
    except TopologyError as e:
        return ProbeResult(False, sentence(str(e)), remedy=e.remedy)
    seen = visible_devices.resolve(inventory, os.environ)
    if not seen.devices:
        return ProbeResult(False, sentence(seen.problem or "no device is visible"), remedy=seen.remedy)
    devices = tuple(DeviceInfo(i, shown.name, shown.memory_bytes) for i, shown in enumerate(seen.devices))
    if not any(shown.device.chip.supported for shown in seen.devices):
        reason = f"{seen.devices[0].name} drives displays, and torch does not compute on it; needed is {chips.NEEDED}."
        return ProbeResult(False, reason, devices, "Use a newer device, or another platform.")
    lack = compute_runtime.missing(topology.ROOT if root is None else root, os.environ)
    if lack is not None:
        return ProbeResult(False, sentence(lack[0]), devices, lack[1])
    if problem := torch_problem():
        return ProbeResult(False, problem[0], devices, problem[1])
    drivers = sorted({shown.device.driver for shown in seen.devices})
    found = f"{counted([device.name for device in devices])}, driver {', '.join(drivers)} of the kernel"
    if seen.problem:
        found += f"; {seen.problem}"
    return ProbeResult(True, found, devices)


def torch_problem() -> tuple[str, str] | None:
    """Why the installed torch cannot use such devices, and what to do; None if it can."""
    build = torch_build.find()
    if build is None:
        return "torch is not installed in this environment.", f"Install its build for XPU{_SEE}."
    if build.kind != "XPU":
        return f"torch {build.version} was built for {build.kind}, not for XPU.", _OTHER_TORCH
    return None


def torch_has_graphs() -> bool:
    """Whether the installed torch can capture graphs on such devices, from its files, without importing it."""
    folder = torch_build.folder()
    return folder is not None and (folder / "xpu" / "graphs.py").exists()
