"""Lists this machine's Intel GPUs from the kernel's files, without opening a device or starting Level Zero.

    /sys/bus/pci/devices/0000:03:00.0/
        vendor, device, class    vendor, chip, and the class of display devices
        driver ->                the kernel's driver of the device: xe, or i915 for older chips
        drm/renderD128           its render node /dev/dri/renderD128; without one it only drives displays
        tile0, tile1             a card's tiles (xe); in each the bytes of its memory, if the kernel reports them

Level Zero numbers cards first, then integrated GPUs, both by PCI address. With ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 it
numbers all by address.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from mvllm_torch_gpu.device_discovery import Inventory, TopologyError, read_int, read_text
from mvllm_xpu import chips
from mvllm_xpu.chips import Chip

ROOT = Path("/")
"""Default root folder of the files."""

BUS_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"

_PCI = Path("sys/bus/pci/devices")
_VENDOR = 0x8086
_DISPLAY = 0x03  # class of devices on the bus
_DRIVERS = ("xe", "i915")
_OWN_MEMORY = ("drm-resident-vram", "drm-resident-local")  # names of a card's memory in the statistics of xe and i915
_OF_PROCESSORS = "0000:00:02.0"
"""PCI address of an integrated GPU."""

_IN_CONTAINER = "in a container, start it with --device=/dev/dri"
_GROUPS = "Add this user to the group render (sudo usermod -aG render $USER) and log in again"


@dataclass(frozen=True)
class XpuDevice:
    """A card, or an integrated GPU, that this process may open.

    Attributes:
        index: Index among these devices, in Level Zero's order.
        address: PCI address, `0000:03:00.0`.
        name: For messages.
        chip: Properties of its chip.
        driver: The kernel's driver: `xe` or `i915`.
        tiles: Number of tiles, each with its own processors and memory.
        memory_bytes: None if it uses the host's memory, or if the kernel does not report it.
    """

    index: int
    address: str
    name: str
    chip: Chip
    driver: str
    tiles: int = 1
    memory_bytes: int | None = None

    @property
    def integrated(self) -> bool:
        """Whether it uses the host's memory."""
        return self.chip.integrated


def read_inventory(root: Path | None = None) -> Inventory[XpuDevice]:
    """The Intel GPUs of this machine.

    Args:
        root: Root folder of the files; None for ROOT.

    Raises:
        TopologyError: There is no Intel GPU, or none that this process may use.
    """
    root = ROOT if root is None else root
    found = [folder for folder in sorted((root / _PCI).glob("*")) if _is_gpu(folder)]
    if not found:
        raise TopologyError(
            "the PCI bus has no Intel GPU",
            "On a machine without such a device, name another platform with --platform. In a virtual machine, pass the "
            "device through; under WSL this platform does not find it.",
        )
    devices: list[XpuDevice] = []
    problems: list[tuple[str, str]] = []
    for folder in found:
        device = _device(folder, root)
        if isinstance(device, XpuDevice):
            devices.append(device)
        else:
            problems.append((f"{folder.name}: {device[0]}", device[1]))
    if not devices:
        raise TopologyError("; ".join(what for what, _ in problems), problems[0][1])
    by_bus = os.environ.get(BUS_ORDER) == "1"
    devices.sort(key=lambda device: (device.integrated and not by_bus, device.address))
    numbered = tuple(replace(device, index=index) for index, device in enumerate(devices))
    return Inventory(numbered, tuple(what for what, _ in problems))


def held_by_process(address: str, fdinfo: Path = Path("/proc/self/fdinfo")) -> int | None:
    """Bytes of a card's own memory that a process holds, from the kernel's statistics of its open files.

    Args:
        address: PCI address of the card.
        fdinfo: Folder with the statistics.

    Returns:
        None if no file of the card is open, or if its driver has no statistics.
    """
    clients: dict[str, int] = {}  # files of one client report the same numbers
    try:
        files = sorted(fdinfo.iterdir())
    except OSError:
        return None
    for file in files:
        facts = _facts(file)
        if facts.get("drm-pdev") != address:
            continue
        sizes = [_bytes(value) for name, value in facts.items() if name.startswith(_OWN_MEMORY)]
        if sizes:
            clients[facts.get("drm-client-id", file.name)] = sum(sizes)
    return sum(clients.values()) if clients else None


def _is_gpu(folder: Path) -> bool:
    return read_int(folder / "vendor") == _VENDOR and (read_int(folder / "class") or 0) >> 16 == _DISPLAY


def _device(folder: Path, root: Path) -> XpuDevice | tuple[str, str]:
    """A device of the bus, or why it cannot be used and what to do."""
    chip_id = read_int(folder / "device") or 0
    chip = chips.of_id(chip_id)
    name = (chip.name if chip else None) or f"Intel GPU [{chip_id:04x}]"
    driver = _link(folder / "driver")
    if driver not in _DRIVERS:
        who = "no driver" if driver is None else f"the driver {driver}"
        return (
            f"{name} is with {who}",
            "Load the kernel's driver for it (modprobe xe; for Arc A-series and older: modprobe i915), of a kernel "
            "that is not older than the device.",
        )
    if chip is None and driver == "i915":
        return f"{name} is older than what Level Zero knows", f"Use {chips.NEEDED}, or another platform."
    chip = chip or chips.newer(folder.name == _OF_PROCESSORS)
    nodes = sorted(node.name for node in (folder / "drm").glob("renderD*"))
    if not nodes:
        return f"{name} shows pictures alone: its driver has made no file to compute by", (
            "Start the kernel without nomodeset, with the device's firmware installed (linux-firmware); see its log."
        )
    if problem := _unopenable(root, nodes[0]):
        return f"{name}: {problem[0]}", problem[1]
    tiles = len(list(folder.glob("tile[0-9]*"))) or chip.tiles
    memory = None if chip.integrated else _memory(folder)
    return XpuDevice(0, folder.name, name, chip, driver, tiles, memory)


def _unopenable(root: Path, node: str) -> tuple[str, str] | None:
    path = Path("dev/dri") / node
    if not (root / path).exists():
        return f"/{path} is not there", f"{_IN_CONTAINER[:1].upper()}{_IN_CONTAINER[1:]}; elsewhere, restart udev."
    if not os.access(root / path, os.R_OK | os.W_OK):
        remedy = f"{_GROUPS}; {_IN_CONTAINER} --group-add $(getent group render | cut -d: -f3)."
        return f"this user may not open /{path}", remedy
    return None


def _memory(folder: Path) -> int | None:
    """Bytes of a card's memory, from the files of its tiles or of the card; None if the kernel has neither."""
    tiles = [read_int(path) for path in sorted(folder.glob("tile[0-9]*/physical_vram_size_bytes"))]
    if tiles and all(tiles):
        return sum(size for size in tiles if size)
    return next((read_int(path) for path in sorted(folder.glob("drm/card*/lmem_total_bytes"))), None)


def _facts(file: Path) -> dict[str, str]:
    """Lines `name: value` of a file."""
    lines = ((read_text(file) or "").splitlines()) if file.is_file() else []
    return {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def _bytes(text: str) -> int:
    """`384 KiB` as a number of bytes."""
    words = text.split()
    if not words or not words[0].isdigit():
        return 0
    return int(words[0]) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get("".join(words[1:]), 1)


def _link(path: Path) -> str | None:
    """Last part of the target of a link; None without a link."""
    try:
        return Path(os.readlink(path)).name
    except OSError:
        return None
