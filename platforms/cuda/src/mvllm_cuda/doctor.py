"""Checks of the CUDA platform for `mvllm doctor`. They read NVML and open no device."""

from __future__ import annotations

import os

from mvllm.plugin_api import Check, CheckStatus
from mvllm_cuda import visible_devices
from mvllm_cuda.nvml import Inventory, NvmlError, read_inventory
from mvllm_cuda.probe import MIN_CAPABILITY, dotted, torch_problem
from mvllm_torch_gpu.doctor_checks import compiler_check, kernels_check, torch_check

_LOW_MEMORY_SHARE = 0.5


def checks() -> list[Check]:
    """Checks of driver, devices, their order, torch, kernels and memory; only the driver's check if that fails."""
    try:
        inventory = read_inventory()
    except NvmlError as e:
        return [Check("platform.cuda.driver", CheckStatus.BROKEN, f"{str(e)[:1].upper()}{str(e)[1:]}.", e.remedy)]
    return [
        _driver(inventory),
        _devices(inventory),
        _order(inventory),
        torch_check("cuda", torch_problem(inventory.cuda_version), "The installed torch can use this driver."),
        kernels_check("cuda"),
        compiler_check("cuda"),
        _memory(inventory),
    ]


def _driver(inventory: Inventory) -> Check:
    found = f"Driver {inventory.driver_version}, for CUDA up to {dotted(inventory.cuda_version)}."
    if inventory.failures:
        found += f" Not all devices answer: {'; '.join(inventory.failures)}."
        remedy = "See nvidia-smi and the kernel's log; a device that has fallen off the bus needs a restart."
        return Check("platform.cuda.driver", CheckStatus.WARNING, found, remedy)
    return Check("platform.cuda.driver", CheckStatus.OK, found)


def _devices(inventory: Inventory) -> Check:
    seen = visible_devices.resolve(inventory, os.environ)
    listed = ", ".join(f"{i}: {device.name}" for i, device in enumerate(seen.devices)) or "none"
    found = f"Visible devices: {listed}."
    if seen.problem:
        return Check("platform.cuda.devices", CheckStatus.WARNING, f"{found} {seen.problem}.", seen.remedy)
    old = [i for i, device in enumerate(seen.devices) if device.compute_capability < MIN_CAPABILITY]
    if old:
        found += f" Those with numbers {old} are older than compute capability {dotted(MIN_CAPABILITY)}."
        remedy = f"Leave them out of {visible_devices.VARIABLE}: a worker that gets one does not start."
        return Check("platform.cuda.devices", CheckStatus.WARNING, found, remedy)
    return Check("platform.cuda.devices", CheckStatus.OK, found)


def _order(inventory: Inventory) -> Check:
    order = os.environ.get(visible_devices.ORDER_VARIABLE)
    found = f"Devices are counted in the order of {order or visible_devices.PCI_ORDER}."
    if visible_devices.order_is_uncertain(inventory, os.environ):
        found += " They are not alike, and CUDA may count them otherwise than is shown here."
        remedy = f"Unset {visible_devices.ORDER_VARIABLE}, or set it to {visible_devices.PCI_ORDER}."
        return Check("platform.cuda.order", CheckStatus.WARNING, found, remedy)
    return Check("platform.cuda.order", CheckStatus.OK, found)


def _memory(inventory: Inventory) -> Check:
    parents = {device.parent for device in visible_devices.resolve(inventory, os.environ).devices}
    devices = [device for device in inventory.devices if device.index in parents]
    texts, low = [], False
    for device in devices:
        if device.memory_bytes is None or device.free_bytes is None:
            texts.append(f"{device.name} uses the host's memory")
            continue
        low = low or device.free_bytes < _LOW_MEMORY_SHARE * device.memory_bytes
        texts.append(f"{device.free_bytes / 2**30:.1f} GiB free of {device.memory_bytes / 2**30:.1f} GiB")
    found = f"{'; '.join(texts) or 'No device is visible'}."
    if low:
        remedy = "Others use this memory, see nvidia-smi: stop them, or lower --memory-utilization."
        return Check("platform.cuda.memory", CheckStatus.WARNING, found, remedy)
    return Check("platform.cuda.memory", CheckStatus.OK, found)
