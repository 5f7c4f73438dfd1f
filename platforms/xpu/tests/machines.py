"""Builds folders with the kernel's files of machines with Intel GPUs, used in place of `/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
LIBRARIES = ("libc.so.6", "libze_loader.so.1", "libze_intel_gpu.so.1")


@dataclass(frozen=True)
class Device:
    """A device of a machine.

    Attributes:
        chip: Its PCI id.
        address: Its PCI address; None for the next free one of a bridge.
        driver: The kernel's driver; None for none.
        tiles: Number of its driver's tile folders.
        memory: Bytes of each tile; None if the kernel does not report them.
        renders: Whether it has a render node.
        opens: Whether the render node exists in /dev.
        vendor, kind: Its PCI vendor and class.
    """

    chip: int = 0xE20B
    address: str | None = None
    driver: str | None = "xe"
    tiles: int = 1
    memory: int | None = None
    renders: bool = True
    opens: bool = True
    vendor: int = 0x8086
    kind: int = 0x030000


B580 = Device()
B60 = Device(chip=0xE211, memory=24 * GIB)
A770 = Device(chip=0x56A0, driver="i915", tiles=0)
MAX_1550 = Device(chip=0x0BD5, tiles=2, memory=64 * GIB, kind=0x038000)
LUNAR_LAKE = Device(chip=0x64A0, address="0000:00:02.0")
UHD_770 = Device(chip=0x4680, address="0000:00:02.0", driver="i915", tiles=0)
IRIS_MAX = Device(chip=0x4905, driver="i915", tiles=0)
NEWER = Device(chip=0xF123)
OLDER = Device(chip=0x3E92, address="0000:00:02.0", driver="i915", tiles=0)
OTHER_MAKER = Device(vendor=0x1A03, chip=0x2000, driver="ast")
NETWORK = Device(chip=0x1572, driver="i40e", kind=0x020000)


def address_of(n: int) -> str:
    """The default PCI address of a machine's n-th device."""
    return f"0000:{3 + n:02x}:00.0"


def build(root: Path, *devices: Device, libraries: tuple[str, ...] = LIBRARIES) -> Path:
    """Writes the files of a machine with these devices and these libraries."""
    for n, device in enumerate(devices):
        folder = root / "sys/bus/pci/devices" / (device.address or address_of(n))
        write(folder / "vendor", f"0x{device.vendor:04x}\n")
        write(folder / "device", f"0x{device.chip:04x}\n")
        write(folder / "class", f"0x{device.kind:06x}\n")
        if device.driver is not None:
            (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{device.driver}")
        for tile in range(device.tiles):
            (folder / f"tile{tile}").mkdir()
            if device.memory is not None:
                write(folder / f"tile{tile}/physical_vram_size_bytes", f"{device.memory}\n")
        (folder / f"drm/card{n}").mkdir(parents=True)
        if device.renders and device.driver is not None:
            (folder / f"drm/renderD{128 + n}").mkdir()
            if device.opens:
                write(root / f"dev/dri/renderD{128 + n}", "")
    (root / "etc").mkdir(parents=True, exist_ok=True)
    cache = b"ld.so-1.7.0\0" + b"".join(f"{name}\0/lib/{name}\0".encode() for name in libraries)
    (root / "etc/ld.so.cache").write_bytes(cache)
    return root


def write(path: Path, text: str) -> None:
    """Writes a file and creates its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
