"""Checks of the ROCm platform for `mvllm doctor`. They read files and open no device."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm.plugin_api import Check, CheckStatus
from mvllm_rocm import targets, visible_devices
from mvllm_rocm.probe import torch_problem
from mvllm_rocm.topology import RocmDevice, read_inventory
from mvllm_torch_gpu.device_discovery import Inventory, TopologyError
from mvllm_torch_gpu.doctor_checks import compiler_check, kernels_check, torch_check
from mvllm_torch_gpu.message_text import sentence

_LOW_MEMORY_SHARE = 0.5


def checks(root: Path | None = None) -> list[Check]:
    """Checks of driver, devices, targets, torch, kernels and memory; only the driver's check if that fails.

    Args:
        root: Root folder of the files.
    """
    try:
        inventory = read_inventory(root)
    except TopologyError as e:
        return [Check("platform.rocm.driver", CheckStatus.BROKEN, sentence(str(e)), e.remedy)]
    return [
        _driver(inventory),
        _devices(inventory),
        _targets(inventory),
        torch_check("rocm", torch_problem(), "The installed torch was built for ROCm."),
        kernels_check("rocm"),
        compiler_check("rocm"),
        _memory(inventory),
    ]


def _driver(inventory: Inventory[RocmDevice]) -> Check:
    found = f"Driver amdgpu, {inventory.driver_version or 'the one of the kernel'}."
    if inventory.failures:
        found += f" Not all devices can be used: {'; '.join(inventory.failures)}."
        remedy = "If they are to be used: add this user to the groups render and video, or give them to the container."
        return Check("platform.rocm.driver", CheckStatus.WARNING, found, remedy)
    return Check("platform.rocm.driver", CheckStatus.OK, found)


def _devices(inventory: Inventory[RocmDevice]) -> Check:
    seen = visible_devices.resolve(inventory, os.environ)
    listed = ", ".join(f"{i}: {device.name}" for i, device in enumerate(seen.devices)) or "none"
    found = f"Visible devices: {listed}."
    if seen.problem:
        return Check("platform.rocm.devices", CheckStatus.WARNING, f"{found} {sentence(seen.problem)}", seen.remedy)
    return Check("platform.rocm.devices", CheckStatus.OK, found)


def _targets(inventory: Inventory[RocmDevice]) -> Check:
    devices = visible_devices.resolve(inventory, os.environ).devices
    names = list(dict.fromkeys(device.target for device in devices))
    found = f"Targets: {', '.join(names) or 'none'}."
    old = [i for i, device in enumerate(devices) if not targets.is_supported(device.target)]
    if old:
        found += f" The devices with numbers {old} cannot be used: needed is {targets.NEEDED}."
        remedy = f"Leave them out of {visible_devices.VARIABLE}: a worker that gets one does not start."
        return Check("platform.rocm.targets", CheckStatus.WARNING, found, remedy)
    if len(names) > 1:
        found += " Workers on unlike devices wait for the slowest one."
        remedy = f"Leave all of one kind in {visible_devices.VARIABLE}."
        return Check("platform.rocm.targets", CheckStatus.WARNING, found, remedy)
    return Check("platform.rocm.targets", CheckStatus.OK, found)


def _memory(inventory: Inventory[RocmDevice]) -> Check:
    texts, low = [], False
    for device in visible_devices.resolve(inventory, os.environ).devices:
        if device.memory_bytes is None:
            texts.append(f"{device.name} uses the host's memory")
        elif device.free_bytes is None:
            texts.append(f"{device.memory_bytes / 2**30:.1f} GiB, free ones unknown")
        else:
            low = low or device.free_bytes < _LOW_MEMORY_SHARE * device.memory_bytes
            texts.append(f"{device.free_bytes / 2**30:.1f} GiB free of {device.memory_bytes / 2**30:.1f} GiB")
    found = f"{'; '.join(texts) or 'No device is visible'}."
    if low:
        remedy = "Others use this memory, see amd-smi process: stop them, or lower --memory-utilization."
        return Check("platform.rocm.memory", CheckStatus.WARNING, found, remedy)
    return Check("platform.rocm.memory", CheckStatus.OK, found)
