"""Checks of the XPU platform for `mvllm doctor`. They read files and open no device."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm.plugin_api import Check, CheckStatus
from mvllm_torch_gpu.device_discovery import Inventory, TopologyError
from mvllm_torch_gpu.doctor_checks import compiler_check, kernels_check, torch_check
from mvllm_torch_gpu.message_text import sentence
from mvllm_xpu import compute_runtime, topology, visible_devices
from mvllm_xpu.probe import torch_has_graphs, torch_problem
from mvllm_xpu.settings import SETTINGS
from mvllm_xpu.topology import XpuDevice, read_inventory


def checks(root: Path | None = None) -> list[Check]:
    """Checks of driver, devices, chips, runtime, torch, kernels and memory; only the driver's check if that fails.

    Args:
        root: Root folder of the files.
    """
    root = topology.ROOT if root is None else root
    try:
        inventory = read_inventory(root)
    except TopologyError as e:
        return [Check("platform.xpu.driver", CheckStatus.BROKEN, sentence(str(e)), e.remedy)]
    return [
        _driver(inventory),
        _devices(inventory),
        _chips(inventory),
        _runtime(root),
        _torch(),
        kernels_check("xpu"),
        compiler_check("xpu"),
        _memory(inventory),
    ]


def _driver(inventory: Inventory[XpuDevice]) -> Check:
    drivers = sorted({device.driver for device in inventory.devices})
    found = f"Driver of the kernel: {', '.join(drivers)}."
    if inventory.failures:
        found += f" Not all devices can be used: {'; '.join(inventory.failures)}."
        remedy = (
            "If they are to be used: load their driver, add this user to the group render, give them to the container."
        )
        return Check("platform.xpu.driver", CheckStatus.WARNING, found, remedy)
    return Check("platform.xpu.driver", CheckStatus.OK, found)


def _devices(inventory: Inventory[XpuDevice]) -> Check:
    seen = visible_devices.resolve(inventory, os.environ)
    listed = ", ".join(f"{i}: {shown.name}" for i, shown in enumerate(seen.devices)) or "none"
    found = f"Visible devices: {listed}."
    if seen.problem:
        return Check("platform.xpu.devices", CheckStatus.WARNING, f"{found} {sentence(seen.problem)}", seen.remedy)
    used = {shown.device for shown in seen.devices}
    left_out = [device.name for device in inventory.devices if device.integrated and device not in used]
    if left_out and used:
        found += f" Torch leaves out {', '.join(left_out)}, since there is a card."
    return Check("platform.xpu.devices", CheckStatus.OK, found)


def _chips(inventory: Inventory[XpuDevice]) -> Check:
    devices = [shown.device for shown in visible_devices.resolve(inventory, os.environ).devices]
    families = list(dict.fromkeys(device.chip.family for device in devices))
    found = f"Architectures: {', '.join(families) or 'none'}."
    old = [i for i, device in enumerate(devices) if not device.chip.supported]
    if old:
        found += f" The devices with numbers {old} drive displays; torch does not compute on them."
        remedy = f"Leave them out of {visible_devices.MASK}: a worker that gets one does not start."
        return Check("platform.xpu.chips", CheckStatus.WARNING, found, remedy)
    if len({device.name for device in devices}) > 1:
        found += " Workers on unlike devices wait for the slowest one."
        return Check(
            "platform.xpu.chips", CheckStatus.WARNING, found, f"Leave all of one kind in {visible_devices.MASK}."
        )
    return Check("platform.xpu.chips", CheckStatus.OK, found)


def _runtime(root: Path) -> Check:
    lack = compute_runtime.missing(root, os.environ)
    if lack is not None:
        return Check("platform.xpu.runtime", CheckStatus.BROKEN, sentence(lack[0]), lack[1])
    return Check("platform.xpu.runtime", CheckStatus.OK, "Level Zero's loader and its driver for GPUs are installed.")


def _torch() -> Check:
    graphs = "has" if torch_has_graphs() else "does not have"
    found = f"The installed torch was built for XPU; it {graphs} XPU graphs ({SETTINGS.prefix}_COMPILE=graphs)."
    return torch_check("xpu", torch_problem(), found)


def _memory(inventory: Inventory[XpuDevice]) -> Check:
    texts = []
    for shown in visible_devices.resolve(inventory, os.environ).devices:
        if shown.device.integrated:
            texts.append(f"{shown.name} uses the host's memory")
        elif shown.memory_bytes is None:
            texts.append(f"{shown.name}: the kernel does not tell how much it has")
        else:
            texts.append(f"{shown.name}: {shown.memory_bytes / 2**30:.1f} GiB, free ones unknown")
    found = f"{'; '.join(texts) or 'No device is visible'}."
    return Check("platform.xpu.memory", CheckStatus.OK, found)
