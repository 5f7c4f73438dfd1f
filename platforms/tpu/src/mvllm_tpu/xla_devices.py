"""Lists the devices that XLA would find, from files and environment variables, without starting XLA's runtime.

A TPU chip is a PCI device of Google. Its driver gives it a file in /dev: `accel0` and so on for older chips, a VFIO
group for newer ones. PJRT_DEVICE selects what XLA opens: TPU, or CPU, which is XLA's device on the host and needs no
hardware; CPU_NUM_DEVICES sets the number of CPU devices.

    PJRT_DEVICE   TPU or unset, with chips: the chips      CPU: CPU_NUM_DEVICES devices, one if unset
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
PJRT_VARIABLE = "PJRT_DEVICE"
NUM_CPUS_VARIABLE = "CPU_NUM_DEVICES"
VISIBLE_VARIABLE = "TPU_VISIBLE_CHIPS"

_VENDOR = "0x1ae0"
_CHIPS = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7x",
}


@dataclass(frozen=True)
class Devices:
    """The devices that XLA would open.

    Attributes:
        kind: `TPU`, `CPU`, or another value of PJRT_DEVICE.
        names: Names of the devices, in order.
        problem: Why there is none; None if there is one.
        remedy: What to do about it.
    """

    kind: str
    names: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str | None = None

    @property
    def on_host(self) -> bool:
        """Whether these are XLA's CPU devices."""
        return self.kind == "CPU"


def find(root: Path | None = None, environ: Mapping[str, str] | None = None) -> Devices:
    """The devices that a process with these environment variables would find.

    Args:
        root: Root folder of the files.
        environ: The environment variables; None for those of this process.
    """
    environ = os.environ if environ is None else environ
    root = ROOT if root is None else root
    kind = environ.get(PJRT_VARIABLE, "").strip().upper()
    if kind == "CPU":
        return _of_the_host(environ)
    if kind not in ("", "TPU"):
        return Devices(
            kind,
            problem=f"{PJRT_VARIABLE}={environ[PJRT_VARIABLE]!r} names a device that this platform does not know",
            remedy=f"Unset {PJRT_VARIABLE}, or set it to TPU or CPU.",
        )
    return _chips(root, environ)


def _of_the_host(environ: Mapping[str, str]) -> Devices:
    text = environ.get(NUM_CPUS_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        return Devices(
            "CPU",
            problem=f"{NUM_CPUS_VARIABLE}={text!r} is no number of devices",
            remedy=f"Set {NUM_CPUS_VARIABLE} to 1 or more, or unset it.",
        )
    return Devices("CPU", ("XLA's CPU device",) * int(text))


def _chips(root: Path, environ: Mapping[str, str]) -> Devices:
    names = _on_the_bus(root)
    files = _device_files(root)
    if not names and not files:
        return Devices(
            "TPU",
            problem="There is no TPU: no such device on the PCI bus, no /dev/accel*",
            remedy=f"Run this on a TPU host. Without one, {PJRT_VARIABLE}=CPU takes XLA's own CPU device, for trials.",
        )
    if not files:
        return Devices(
            "TPU",
            problem=f"{names[0]} is there, but neither /dev/accel* nor /dev/vfio/* can be seen",
            remedy="Give the container its devices (--privileged, or --device=/dev/vfio or --device=/dev/accel0 ...).",
        )
    if closed := [file for file in files if not os.access(file, os.R_OK | os.W_OK)]:
        chip = names[0] if names else "A TPU"
        return Devices(
            "TPU",
            problem=f"{chip} is there, but this user may not open /{closed[0].relative_to(root)}",
            remedy="Run as root, or give this user access to these files (ls -l shows the group that has it).",
        )
    names = names or ("TPU",) * len(files)
    visible = environ.get(VISIBLE_VARIABLE)
    if visible is None:
        return Devices("TPU", names)
    wanted = [entry.strip() for entry in visible.split(",") if entry.strip()]
    wrong = [entry for entry in wanted if not entry.isdecimal() or int(entry) >= len(names)]
    if wrong or not wanted:
        what = f"names {', '.join(wrong)}, of {len(names)} chips" if wrong else "hides every chip"
        remedy = f"Unset {VISIBLE_VARIABLE}, or list chips from 0 to {len(names) - 1} in it."
        return Devices("TPU", problem=f"{VISIBLE_VARIABLE}={visible!r} {what}", remedy=remedy)
    return Devices("TPU", tuple(names[int(entry)] for entry in wanted))


def _on_the_bus(root: Path) -> tuple[str, ...]:
    """Names of the chips on the PCI bus, in the order of the bus."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor") == _VENDOR and (device := _read(folder / "device")) in _CHIPS:
            found.append(_CHIPS[device])
    return tuple(found)


def _device_files(root: Path) -> list[Path]:
    """The device files of chips. A VFIO group may belong to another device; it counts only with a chip on the bus."""
    accel = [path for path in sorted((root / "dev").glob("accel*")) if re.fullmatch(r"accel\d+", path.name)]
    folder = root / "dev/accel"
    accel += sorted(folder.glob("accel*")) if folder.is_dir() and _on_the_bus(root) else []
    if accel:
        return accel
    groups = [path for path in sorted((root / "dev/vfio").glob("*")) if path.name.isdecimal()]
    return groups if _on_the_bus(root) else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
