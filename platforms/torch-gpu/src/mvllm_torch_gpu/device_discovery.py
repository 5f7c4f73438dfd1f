"""Values and file readers for finding devices before torch is imported.

A platform's probe lists the installed devices (`Inventory`, or `TopologyError` if none can be used) and then
determines which of them the environment variables leave visible (`VisibleDevices`). This module imports no torch and
opens no device, so a process that has used it may still be forked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

DeviceT = TypeVar("DeviceT")


class TopologyError(Exception):
    """There is no device or no driver, or this process may not use it.

    Attributes:
        remedy: What the user can do.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Inventory(Generic[DeviceT]):
    """Installed devices.

    Attributes:
        devices: The devices that this process may open, in the driver's order.
        failures: One text for each device that cannot be used, with the reason.
        driver_version: For display; None if the driver is part of the kernel.
    """

    devices: tuple[DeviceT, ...]
    failures: tuple[str, ...] = ()
    driver_version: str | None = None


@dataclass(frozen=True)
class VisibleDevices(Generic[DeviceT]):
    """Devices that a process sees with given environment variables.

    Attributes:
        devices: The devices in torch's order.
        problem: What is wrong with the variables, or why no device is visible; None if there is no problem.
        remedy: What to do about the problem.
    """

    devices: tuple[DeviceT, ...]
    problem: str | None = None
    remedy: str | None = None


def describe_variables(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """The variables of `names` that are set, with their values; empty if none is set."""
    return ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)


def device_list_remedy(variable: str, num_devices: int, *, prefix: str = "", uuids_from: str | None = None) -> str:
    """How to write a list of devices in `variable`.

    Args:
        variable: The environment variable.
        num_devices: Number of devices that can be listed.
        prefix: Text before each number.
        uuids_from: Program that shows the devices' UUIDs, if the list may hold UUIDs.
    """
    numbers = f"{prefix}0" if num_devices == 1 else f"{prefix}0 to {num_devices - 1}"
    by_uuid = f" or by UUID as {uuids_from} shows them" if uuids_from else ""
    return f"List devices by number ({numbers}){by_uuid}, or unset {variable}."


def read_text(path: Path) -> str | None:
    """Content of a small file, stripped; None if it is empty, absent or not readable."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Number in a file of the kernel: `0x56a0` or `17179869184`; None if there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None
