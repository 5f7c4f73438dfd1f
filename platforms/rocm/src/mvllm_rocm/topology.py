"""Lists this machine's ROCm devices from the files of the kernel driver.

HIP and the library below it read the devices from the same files, and number them in the same order:

    /sys/class/kfd/kfd/topology/nodes/N/   processors and devices, one folder each; a device has SIMD units
        properties      lines `name number`: target, unique id, PCI ids, number of its file /dev/dri/renderD...
        gpu_id          the driver's id of the device
        mem_banks/*/    its memory
    /sys/class/kfd/kfd/proc/PID/vram_ID    bytes that a process holds on the device with that gpu_id
    /sys/class/drm/renderD.../device/      bytes of a device in use by all processes, its names

Reading files opens no device and starts no thread, so a process that has read them may still be forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mvllm_rocm import targets
from mvllm_torch_gpu.device_discovery import Inventory, TopologyError, read_int, read_text

ROOT = Path("/")
"""Default root folder of the files."""

_KFD = Path("sys/class/kfd/kfd")
_DEVICE_FILE = Path("dev/kfd")
_NAMES = (Path("opt/amdgpu/share/libdrm/amdgpu.ids"), Path("usr/share/libdrm/amdgpu.ids"))
_DEVICE_MEMORY = (1, 2)  # kinds of memory banks: the device's own, visible to the host or not

_IN_CONTAINER = "in a container, start it with --device=/dev/kfd --device=/dev/dri"
_GROUPS = "Add this user to the groups render and video, and log in again"


@dataclass(frozen=True)
class RocmDevice:
    """A device, or a partition of one, that this process may open.

    Attributes:
        index: Index among these devices, in the driver's order.
        name: For messages.
        target: For example `gfx942`.
        uuid: `GPU-` and 16 hexadecimal digits; None if the device has none.
        memory_bytes: None if it uses the host's memory.
        free_bytes: Free memory; None if the driver does not report it.
        gpu_id: The driver's id of the device.
        folder: Its folder in sysfs; None if it has none.
    """

    index: int
    name: str
    target: str
    uuid: str | None
    memory_bytes: int | None
    free_bytes: int | None
    gpu_id: int
    folder: Path | None = None


def read_inventory(root: Path | None = None) -> Inventory[RocmDevice]:
    """The ROCm devices of this machine.

    Args:
        root: Root folder of the files; None for ROOT.

    Raises:
        TopologyError: There is no driver, or this process may not use it.
    """
    root = ROOT if root is None else root
    nodes = root / _KFD / "topology" / "nodes"
    if not nodes.is_dir():
        raise TopologyError(
            "there is no driver for ROCm devices: /sys/class/kfd is not there",
            f"Install the amdgpu driver and load it (modprobe amdgpu), so that rocminfo lists the devices; "
            f"{_IN_CONTAINER}. On a machine without such a device, name another platform with --platform.",
        )
    devices: list[RocmDevice] = []
    failures: list[str] = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            properties = _properties(node / "properties")
        except OSError:  # a container may read only its own devices
            failures.append(f"node {node.name} is not readable for this process")
            continue
        if not properties.get("simd_count"):
            continue  # a processor
        if problem := _unopenable(root, properties):
            failures.append(f"node {node.name}: {problem}")
            continue
        devices.append(_device(len(devices), node, properties, root))
    if devices or failures:  # without a device the file need not exist
        _check_device_file(root)
    return Inventory(tuple(devices), tuple(failures), read_text(root / "sys/module/amdgpu/version"))


def used_bytes(device: RocmDevice) -> int | None:
    """Bytes of a device's memory in use by all processes; None if the driver does not report them."""
    return None if device.folder is None else read_int(device.folder / "mem_info_vram_used")


def bytes_of_process(device: RocmDevice, pid: int, root: Path | None = None) -> int | None:
    """Bytes that a process holds on a device; None if the driver does not know the process.

    Args:
        pid: The process id outside of containers, which the driver uses.
    """
    return read_int((ROOT if root is None else root) / _KFD / "proc" / str(pid) / f"vram_{device.gpu_id}")


def _device(index: int, node: Path, properties: dict[str, int], root: Path) -> RocmDevice:
    target = targets.name_of(properties.get("gfx_target_version", 0))
    chip, identity = properties.get("device_id", 0), properties.get("unique_id", 0)
    folder = root / "sys/class/drm" / f"renderD{properties.get('drm_render_minor', 0)}" / "device"
    device = RocmDevice(
        index=index,
        name=_name(folder, chip, root) or f"AMD {target}",
        target=target,
        uuid=f"GPU-{identity:016x}" if identity else None,
        memory_bytes=None if targets.is_integrated(target, chip) else _memory(node) or None,
        free_bytes=None,
        gpu_id=read_int(node / "gpu_id") or 0,
        folder=folder if folder.is_dir() else None,
    )
    if device.memory_bytes is None or (used := used_bytes(device)) is None:
        return device
    return replace(device, free_bytes=max(0, device.memory_bytes - used))


def _memory(node: Path) -> int:
    banks = (_properties(bank / "properties") for bank in sorted((node / "mem_banks").glob("*")))
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _DEVICE_MEMORY)


def _name(folder: Path, chip: int, root: Path) -> str | None:
    """A device's name: the board's product name, or the entry of the name list for its chip and revision."""
    if product := read_text(folder / "product_name"):
        return product
    revision = int(read_text(folder / "revision") or "0", 16)
    for path in _NAMES:
        for known_chip, known_revision, name in _known_names(root / path):
            if (known_chip, known_revision) == (chip, revision):
                return name
    return None


def _known_names(path: Path) -> Iterator[tuple[int, int, str]]:
    """Entries of a name list: chip, revision, name, separated by commas."""
    for line in (read_text(path) or "").splitlines():
        fields = [field.strip() for field in line.split(",", 2)]
        if len(fields) == 3 and not line.startswith("#"):
            yield int(fields[0], 16), int(fields[1], 16), fields[2]


def _unopenable(root: Path, properties: dict[str, int]) -> str | None:
    """Why this process cannot open a device; None if it can."""
    path = Path("dev/dri") / f"renderD{properties.get('drm_render_minor', 0)}"
    if not (root / path).exists():
        return f"/{path} is not there"
    if not os.access(root / path, os.R_OK | os.W_OK):
        return f"this user may not open /{path}"
    return None


def _check_device_file(root: Path) -> None:
    path = root / _DEVICE_FILE
    if not path.exists():
        remedy = f"{_IN_CONTAINER[:1].upper()}{_IN_CONTAINER[1:]}; elsewhere, reload the driver (modprobe amdgpu)."
        raise TopologyError("the driver has devices, but /dev/kfd is not there", remedy)
    if not os.access(path, os.R_OK | os.W_OK):
        remedy = f"{_GROUPS}; {_IN_CONTAINER} --group-add video --group-add render."
        raise TopologyError("this user may not open /dev/kfd", remedy)


def _properties(path: Path) -> dict[str, int]:
    """Lines `name number` of a file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}
