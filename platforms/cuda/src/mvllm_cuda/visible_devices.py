"""The devices that CUDA shows to a process, in CUDA's order, computed from environment variables without loading CUDA.

CUDA_VISIBLE_DEVICES lists devices by number or by UUID; a unique prefix of a UUID is enough. CUDA reads the list from
the left and stops silently at the first invalid entry. If a device is listed twice, CUDA shows no device. An empty list
hides every device; without the variable, every device is visible.

    installed   0 A100   1 A100   2 T4   3 T4
    list        "2,0"  ->  2 0        "0,7,1"  ->  0        "0,0"  ->  none        "GPU-5c"  ->  UUID with that prefix

A partitioned (MIG) device is not visible as a whole. CUDA shows one compute instance to a process: the first one in the
list, or the first existing one; if it shows a compute instance, it shows no whole device.

CUDA_DEVICE_ORDER sets the order of device numbers. Unless the user has set it, the platform sets it to the order of the
PCI bus for its workers, which nvidia-smi uses; CUDA's default, by speed, cannot be computed without CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mvllm_cuda.nvml import Inventory, NvmlDevice
from mvllm_torch_gpu.device_discovery import VisibleDevices, device_list_remedy

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True)
class VisibleDevice:
    """A device, or a compute instance of one, as a process sees it.

    Attributes:
        name, uuid: Name and UUID from NVML.
        memory_bytes: None if it uses the host's memory.
        compute_capability: (major, minor).
        parent: NVML's index of the physical device.
    """

    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: tuple[int, int]
    parent: int


def resolve(inventory: Inventory, environ: Mapping[str, str]) -> VisibleDevices[VisibleDevice]:
    """The devices that a process with these environment variables sees."""
    text = environ.get(VARIABLE)
    if text is None:
        return _everything(inventory)
    shown = f"{VARIABLE}={text!r}"
    remedy = device_list_remedy(VARIABLE, len(inventory.devices), uuids_from="nvidia-smi -L")
    entries = [entry.strip() for entry in text.split(",")]
    if not text.strip():
        return VisibleDevices((), f"{shown} hides every device", f"Unset {VARIABLE}, or list the devices to use.")
    found: list[VisibleDevice] = []
    for position, entry in enumerate(entries):
        named = _named(entry, inventory)
        if isinstance(named, str):
            hidden = ", ".join(repr(other) for other in entries[position:])
            problem = f"{shown}: {named}; CUDA stops there and does not show {hidden}"
            return VisibleDevices(_shown(found), problem, remedy)
        if any(named.uuid == other.uuid for other in found):
            problem = f"{shown} names {named.uuid} twice, and CUDA then shows no device at all"
            return VisibleDevices((), problem, "Name each device once.")
        found.append(named)
    devices = _shown(found)
    if len(devices) < len(found):
        problem = (
            f"{shown} names {len(found)} devices; with an instance of a partitioned (MIG) one, CUDA shows it alone"
        )
        return VisibleDevices(devices, problem, "Give each process one MIG device, or only whole devices.")
    return VisibleDevices(devices)


def order_is_uncertain(inventory: Inventory, environ: Mapping[str, str]) -> bool:
    """Whether CUDA may number devices differently than this module: by speed, among devices of several kinds."""
    by_speed = environ.get(ORDER_VARIABLE, PCI_ORDER) != PCI_ORDER
    return by_speed and len({(device.name, device.compute_capability) for device in inventory.devices}) > 1


def _everything(inventory: Inventory) -> VisibleDevices[VisibleDevice]:
    every = [seen for device in inventory.devices if (seen := _as_seen(device)) is not None]
    if not every and inventory.devices:
        return VisibleDevices((), "every device is partitioned (MIG) and has no compute instance", _MIG_REMEDY)
    return VisibleDevices(_shown(every))


_MIG_REMEDY = "Create one (nvidia-smi mig -cgi ... -C), or switch MIG off (nvidia-smi -mig 0)."


def _shown(found: list[VisibleDevice]) -> tuple[VisibleDevice, ...]:
    """The listed devices that CUDA shows: only the first compute instance if there is one among them."""
    instance = next((device for device in found if device.uuid.startswith("MIG-")), None)
    return tuple(found) if instance is None else (instance,)


def _as_seen(device: NvmlDevice) -> VisibleDevice | None:
    """The device, or the first compute instance of a partitioned one (None if it has none)."""
    if not device.mig_enabled:
        return VisibleDevice(
            device.name, device.uuid, device.memory_bytes, device.compute_capability, parent=device.index
        )
    first = next(iter(device.mig_devices), None)
    if first is None:
        return None
    return VisibleDevice(first.name, first.uuid, first.memory_bytes, device.compute_capability, parent=device.index)


def _named(entry: str, inventory: Inventory) -> VisibleDevice | str:
    """The device that an entry of the list names, or an error text."""
    if entry.startswith("MIG-"):
        return _mig(entry, inventory)
    if entry.startswith("GPU-"):
        fitting = [device for device in inventory.devices if device.uuid.startswith(entry)]
        if len(fitting) != 1:
            return f"{entry!r} is the beginning of {len(fitting) or 'no'} {'UUIDs' if fitting else 'UUID'}"
        device = fitting[0]
    else:
        number = re.match(r"\d+", entry)  # CUDA reads the leading digits
        if number is None:
            return f"{entry!r} is neither a number nor a UUID (GPU-... or MIG-...)"
        position = int(number[0])
        if position >= len(inventory.devices):
            return f"there is no device {position}, of {len(inventory.devices)}"
        device = inventory.devices[position]
    seen = _as_seen(device)
    return f"device {device.index} is partitioned (MIG) and has no compute instance" if seen is None else seen


def _mig(entry: str, inventory: Inventory) -> VisibleDevice | str:
    fitting = [
        VisibleDevice(mig.name, mig.uuid, mig.memory_bytes, device.compute_capability, parent=device.index)
        for device in inventory.devices
        for mig in device.mig_devices
        if mig.uuid.startswith(entry) or mig.old_id == entry
    ]
    if len(fitting) == 1:
        return fitting[0]
    return f"{entry!r} names {len(fitting) or 'no'} MIG {'devices' if fitting else 'device'}"
