"""Probe of the CUDA platform: reads NVML and torch's files without loading torch or CUDA."""

from __future__ import annotations

import os

from mvllm.plugin_api import DeviceInfo, ProbeResult, install_command
from mvllm_cuda import visible_devices
from mvllm_cuda.nvml import NvmlError, read_inventory
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.message_text import counted, sentence

MIN_CAPABILITY = (8, 0)
"""Lowest supported compute capability."""

_OTHER_TORCH = "Install torch's build for CUDA in its place, see torch's installation page; then reinstall mvllm-cuda."


def probe() -> ProbeResult:
    """Checks that there are a driver, visible devices, and a torch that can use them."""
    try:
        inventory = read_inventory()
    except NvmlError as e:
        return ProbeResult(False, sentence(str(e)), remedy=e.remedy)
    seen = visible_devices.resolve(inventory, os.environ)
    if not seen.devices:
        nothing = seen.problem or "; ".join(inventory.failures) or "the driver finds no device"
        remedy = seen.remedy or "Run nvidia-smi: it must list a device. In a container, give it access to one."
        return ProbeResult(False, sentence(nothing), remedy=remedy)
    devices = tuple(DeviceInfo(i, device.name, device.memory_bytes) for i, device in enumerate(seen.devices))
    if all(device.compute_capability < MIN_CAPABILITY for device in seen.devices):
        first = seen.devices[0]
        reason = f"{first.name} has compute capability {dotted(first.compute_capability)}, needed is "
        reason += f"{dotted(MIN_CAPABILITY)} or newer."
        return ProbeResult(False, reason, devices, "Use a newer device (Ampere or later), or another platform.")
    if problem := torch_problem(inventory.cuda_version):
        return ProbeResult(False, problem[0], devices, problem[1])
    names = counted([device.name for device in devices])
    found = f"{names}, driver {inventory.driver_version} (CUDA {dotted(inventory.cuda_version)})"
    if seen.problem:
        found += f"; {seen.problem}"
    return ProbeResult(True, found, devices)


def torch_problem(driver_cuda: tuple[int, int]) -> tuple[str, str] | None:
    """Why the installed torch cannot use the driver, and what to do; None if it can.

    A driver runs programs that were built for its own major version of CUDA or for an older one.
    """
    build = torch_build.find()
    if build is None:
        return (
            "torch is not installed in this environment.",
            f"Run: {install_command('torch>=2.6', torch_backend='auto')}",
        )
    if build.cuda is None:
        return f"torch {build.version} was built for {build.kind}, not for CUDA.", _OTHER_TORCH
    if build.cuda[0] > driver_cuda[0]:
        return (
            f"torch {build.version} was built with CUDA {dotted(build.cuda)}, the driver supports "
            f"{dotted(driver_cuda)} at most.",
            f"Update the driver, or install a torch that was built with CUDA {driver_cuda[0]}.",
        )
    return None


def dotted(version: tuple[int, int]) -> str:
    """A version as text: (13, 0) is `13.0`."""
    return f"{version[0]}.{version[1]}"
