"""Builds folders with the driver's files of machines with ROCm devices, used in place of `/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
NAMES = "# List\n1.0.0\n74A1,\t00,\tAMD Instinct MI300X\n740F,\t02,\tAMD Instinct MI210\n1586,\tC1,\tRadeon 8060S\n"


@dataclass(frozen=True)
class Device:
    """A device of a machine.

    Attributes:
        target: The driver's number of the target.
        chip, revision: PCI ids.
        memory, used: Bytes of its own memory, total and in use; None if there is no such file.
        product: Product name of the board.
        identity: Unique id, from which its UUID is made; None for a default one.
        held: Bytes that processes hold, by pid.
        opens: Whether its device file exists.
        hidden: Whether this process may not read its properties.
    """

    target: int = 90402
    chip: int = 0x74A1
    revision: int = 0
    memory: int = 192 * GIB
    used: int | None = 0
    product: str = ""
    identity: int | None = None
    held: tuple[tuple[int, int], ...] = ()
    opens: bool = True
    hidden: bool = False


MI300X = Device()
MI300A = Device(chip=0x74A0, memory=128 * GIB)
MI210 = Device(target=90010, chip=0x740F, revision=2, memory=64 * GIB)
MI355X = Device(target=90500, chip=0x75A3, memory=288 * GIB, product="AMD Instinct MI355X OAM")
RX6800 = Device(target=100300, chip=0x73BF, revision=0xC3, memory=16 * GIB)
HALO = Device(target=110501, chip=0x1586, revision=0xC1, memory=96 * GIB)


def uuid_of(n: int) -> str:
    """The default UUID of a machine's n-th device."""
    return f"GPU-{identity_of(n):016x}"


def identity_of(n: int) -> int:
    """The default unique id of a machine's n-th device."""
    return 0xAB10 << 48 | n << 32 | 0xC0FFEE


def build(root: Path, *devices: Device, version: str | None = "6.12.12", kfd: bool = True) -> Path:
    """Writes the files of a machine with a processor and these devices."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\nunique_id 0\n")
    write(nodes / "0/gpu_id", "0\n")
    for n, device in enumerate(devices):
        node, minor = nodes / str(n + 1), 128 + 8 * n
        identity = identity_of(n) if device.identity is None else device.identity
        facts = {
            "cpu_cores_count": 0,
            "simd_count": 1216,
            "gfx_target_version": device.target,
            "vendor_id": 4098,
            "device_id": device.chip,
            "drm_render_minor": minor,
            "unique_id": identity,
        }
        if device.hidden:  # a folder in place of the file: reading it fails even for root
            (node / "properties").mkdir(parents=True)
        else:
            write(node / "properties", "".join(f"{name} {value}\n" for name, value in facts.items()))
        write(node / "gpu_id", f"{1000 + n}\n")
        write(node / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {device.memory}\nflags 0\n")
        folder = root / f"sys/class/drm/renderD{minor}/device"
        write(folder / "revision", f"0x{device.revision:02x}\n")
        write(folder / "product_name", f"{device.product}\n")
        if device.used is not None:
            write(folder / "mem_info_vram_total", f"{device.memory}\n")
            write(folder / "mem_info_vram_used", f"{device.used}\n")
        for pid, size in device.held:
            write(root / f"sys/class/kfd/kfd/proc/{pid}/vram_{1000 + n}", f"{size}\n")
        if device.opens:
            write(root / f"dev/dri/renderD{minor}", "")
    write(root / "usr/share/libdrm/amdgpu.ids", NAMES)
    if version is not None:
        write(root / "sys/module/amdgpu/version", f"{version}\n")
    if kfd:
        write(root / "dev/kfd", "")
    return root


def write(path: Path, text: str) -> None:
    """Writes a file and creates its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
