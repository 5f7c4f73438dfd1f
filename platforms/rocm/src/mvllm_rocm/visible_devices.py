"""The devices that HIP shows to a process, in HIP's order, computed from environment variables without loading HIP.

Two lists select devices, one after the other. ROCm's runtime, below HIP, reads ROCR_VISIBLE_DEVICES, whose numbers are
those of the driver's devices. HIP reads HIP_VISIBLE_DEVICES, whose numbers count the devices selected by the first
list; if it is unset or empty, HIP reads CUDA_VISIBLE_DEVICES instead. Entries are numbers or UUIDs (GPU-...).

    installed   0 a   1 b   2 c   3 d
    ROCR        "3,1"                    ->  d b
    HIP         "1"                      ->  b

                     ROCR_VISIBLE_DEVICES                 HIP_VISIBLE_DEVICES
    invalid entry    ends the list                        ends the list
    repeated entry   ends the list                        is skipped; torch then counts no device
    UUID             a prefix that is unique,             a substring, the first device that has it;
                     any letter case                      case-sensitive
    blanks           are skipped                          make an entry invalid
    empty list       hides every device                   means no list for HIP; torch counts no device

Torch counts devices from the same variables with different rules, and rejects a HIP list that is longer than the ROCR
list. If torch's count differs from HIP's devices, the result names the problem.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mvllm_rocm.topology import RocmDevice
from mvllm_torch_gpu.device_discovery import Inventory, VisibleDevices, describe_variables, device_list_remedy

LOWER = "ROCR_VISIBLE_DEVICES"
VARIABLE = "HIP_VISIBLE_DEVICES"
OTHER = "CUDA_VISIBLE_DEVICES"
VARIABLES = (LOWER, VARIABLE, OTHER)

_UNSET = f"Unset {VARIABLE} and {OTHER}, or list the devices to use in one of them."


def resolve(inventory: Inventory[RocmDevice], environ: Mapping[str, str]) -> VisibleDevices[RocmDevice]:
    """The devices that a process with these environment variables sees through torch."""
    left = _left_by_lower(inventory.devices, environ.get(LOWER))
    if not left.devices:
        return left
    shown = _shown_by_hip(left.devices, environ)
    if left.problem:
        shown = VisibleDevices(shown.devices, left.problem, left.remedy)
    return _counted_by_torch(shown, environ)


def _left_by_lower(devices: Sequence[RocmDevice], text: str | None) -> VisibleDevices[RocmDevice]:
    """The driver's devices that ROCR_VISIBLE_DEVICES selects."""
    if text is None:
        return VisibleDevices(tuple(devices))
    shown, remedy = f"{LOWER}={text!r}", _remedy(LOWER, devices)
    if not text:
        return VisibleDevices((), f"{shown} hides every device", f"Unset {LOWER}, or list the devices to use.")
    entries = [entry.strip().upper() for entry in text.removesuffix(",").split(",")]
    found: list[RocmDevice] = []
    for position, entry in enumerate(entries[: len(devices)]):
        if not entry:
            return VisibleDevices((), f"{shown} has an empty entry, at which ROCm's runtime fails", remedy)
        named = _named_in_lower(entry, devices)
        if isinstance(named, RocmDevice) and named in found:
            named = f"{entry!r} is named again"
        if isinstance(named, str):
            hidden = ", ".join(repr(other) for other in entries[position:])
            problem = f"{shown}: {named}; ROCm's runtime stops there and does not show {hidden}"
            return VisibleDevices(tuple(found), problem, remedy)
        found.append(named)
    if len(entries) > len(devices):
        problem = f"{shown} has {len(entries)} entries for {len(devices)} devices; ROCm's runtime reads no more"
        return VisibleDevices(tuple(found), problem, remedy)
    return VisibleDevices(tuple(found))


def _named_in_lower(entry: str, devices: Sequence[RocmDevice]) -> RocmDevice | str:
    """The device that an entry (in upper case) of ROCR_VISIBLE_DEVICES names, or an error text."""
    if entry.startswith("G"):
        fitting = [device for device in devices if (device.uuid or "").upper().startswith(entry)]
        if len(entry) > len("GPU-") and len(fitting) == 1:
            return fitting[0]
        return f"{entry!r} is the beginning of {len(fitting) or 'no'} {'UUIDs' if fitting else 'UUID'}"
    number = re.fullmatch(r"\+?(0X[0-9A-F]+|0[0-7]*|[1-9]\d*)", entry)  # a number in C's syntax
    if number is None:
        return f"{entry!r} is neither a number nor a UUID (GPU-...)"
    digits = number[1]
    position = int(digits, 16 if digits.startswith("0X") else 8 if digits.startswith("0") else 10)
    return devices[position] if position < len(devices) else f"there is no device {position}, of {len(devices)}"


def _shown_by_hip(devices: Sequence[RocmDevice], environ: Mapping[str, str]) -> VisibleDevices[RocmDevice]:
    """The devices that HIP shows among those that ROCR_VISIBLE_DEVICES selects."""
    variable = VARIABLE if environ.get(VARIABLE) else OTHER
    text = environ.get(variable)
    if not text:
        return VisibleDevices(tuple(devices))
    entries = text.removesuffix(",").split(",")
    found: list[RocmDevice] = []
    for position, entry in enumerate(entries):
        named = _named_to_hip(entry, devices)
        if isinstance(named, str):
            hidden = ", ".join(repr(other) for other in entries[position:])
            problem = f"{variable}={text!r}: {named}; HIP stops there and does not show {hidden}"
            return VisibleDevices(tuple(found), problem, _remedy(variable, devices))
        if named not in found:
            found.append(named)
    if environ.get(OTHER) and environ[OTHER] != text:
        problem = f"{describe_variables(VARIABLES, environ)}: HIP reads {VARIABLE} alone, and not {OTHER}"
        return VisibleDevices(tuple(found), problem, f"Unset {OTHER}, or set both to the same list.")
    return VisibleDevices(tuple(found))


def _named_to_hip(entry: str, devices: Sequence[RocmDevice]) -> RocmDevice | str:
    """The device that an entry of HIP's list names, or an error text."""
    if "GPU-" in entry:
        fitting = next((device for device in devices if entry in (device.uuid or "GPU-XX")), None)
        return fitting or f"{entry!r} is part of no device's UUID"
    if not re.fullmatch(r"0|[1-9]\d*", entry):
        return f"{entry!r} is neither a plain number nor a UUID (GPU-...)"
    return devices[int(entry)] if int(entry) < len(devices) else f"there is no device {entry}, of {len(devices)}"


def _counted_by_torch(seen: VisibleDevices[RocmDevice], environ: Mapping[str, str]) -> VisibleDevices[RocmDevice]:
    """The devices that torch counts. Torch reads the lists itself."""
    lower, own, other = (environ.get(name) for name in VARIABLES)
    lists = describe_variables(VARIABLES, environ)
    if lower is not None and own is not None and len(own.split(",")) > len(lower.split(",")):
        problem = f"{lists}: torch rejects a list for HIP that is longer than {LOWER}"
        return VisibleDevices((), problem, f"{VARIABLE} numbers the devices that {LOWER} selects: unset one of them.")
    text = own if own is not None else None if lower is not None else other
    if text is not None:
        entries = [entry.strip() for entry in text.split(",")]
        if not text.strip():
            name = VARIABLE if own is not None else OTHER
            return VisibleDevices((), f"{name}={text!r} hides every device from torch", _UNSET)
        if len(set(entries)) < len(entries):
            return VisibleDevices((), f"{lists} names a device twice: torch then counts none", "Name each once.")
    elif lower is not None and other and len(lower.split(",")) != len(seen.devices) and seen.problem is None:
        problem = f"{lists}: torch counts the entries of {LOWER}, HIP shows {len(seen.devices)}"
        return VisibleDevices(seen.devices, problem, f"Set {VARIABLE} in place of {OTHER}.")
    return seen


def _remedy(variable: str, devices: Sequence[RocmDevice]) -> str:
    return device_list_remedy(variable, len(devices), uuids_from="rocminfo")
