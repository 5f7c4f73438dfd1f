"""Which devices HIP will show to a process, and in which order, worked out without HIP.

Two lists narrow down what there is, one after the other. ROCR_VISIBLE_DEVICES is read by the library below HIP, and
counts the driver's devices. HIP_VISIBLE_DEVICES is read by HIP, and counts what the first has left; where it is not
set, or empty, HIP reads CUDA_VISIBLE_DEVICES in its place. Entries are numbers or UUIDs (GPU-...).

    installed   0 a   1 b   2 c   3 d
    ROCR        "3,1"                    ->  d b
    HIP         "1"                      ->  b

                     ROCR_VISIBLE_DEVICES                 HIP_VISIBLE_DEVICES
    wrong entry      ends the list                        ends the list
    named again      ends the list                        is passed over; torch then counts no device
    UUID             a beginning that fits one alone,     a part that fits, the first one that has it;
                     capitals or not                      as written
    blanks           are passed over                      make an entry wrong
    empty list       hides everything                     is no list to HIP; torch counts no device

Torch counts by itself, from the same variables, and refuses a list for HIP that is longer than the other one. What it
counts and what HIP shows may differ: that is a problem, and told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mvllm_rocm.topology import Inventory, RocmDevice

LOWER = "ROCR_VISIBLE_DEVICES"
VARIABLE = "HIP_VISIBLE_DEVICES"
OTHER = "CUDA_VISIBLE_DEVICES"
VARIABLES = (LOWER, VARIABLE, OTHER)

_UNSET = f"Unset {VARIABLE} and {OTHER}, or list the devices to use in one of them."


@dataclass(frozen=True)
class Visible:
    """What a process sees.

    Attributes:
        devices: In HIP's order.
        problem: What is wrong with the lists, or why nothing is seen although there is something; None if all is well.
        remedy: What to do about it.
    """

    devices: tuple[RocmDevice, ...]
    problem: str | None = None
    remedy: str | None = None


def resolve(inventory: Inventory, environ: Mapping[str, str]) -> Visible:
    """The devices that a process with these variables sees through torch."""
    left = _left_by_lower(inventory.devices, environ.get(LOWER))
    if not left.devices:
        return left
    shown = _shown_by_hip(left.devices, environ)
    if left.problem:
        shown = Visible(shown.devices, left.problem, left.remedy)
    return _counted_by_torch(shown, environ)


def describe_variables(environ: Mapping[str, str]) -> str:
    """The lists that are set, for people; empty without any."""
    return ", ".join(f"{name}={environ[name]!r}" for name in VARIABLES if name in environ)


def _left_by_lower(devices: Sequence[RocmDevice], text: str | None) -> Visible:
    """What the library below HIP leaves of the driver's devices."""
    if text is None:
        return Visible(tuple(devices))
    shown = f"{LOWER}={text!r}"
    if not text:
        return Visible((), f"{shown} hides every device", f"Unset {LOWER}, or list the devices to use.")
    entries = [entry.strip().upper() for entry in text.removesuffix(",").split(",")]
    found: list[RocmDevice] = []
    for position, entry in enumerate(entries[: len(devices)]):
        if not entry:
            return Visible((), f"{shown} has an empty entry, at which ROCm's runtime fails", _remedy(LOWER, devices))
        named = _named_in_lower(entry, devices)
        if isinstance(named, RocmDevice) and named in found:
            named = f"{entry!r} is named again"
        if isinstance(named, str):
            hidden = ", ".join(repr(other) for other in entries[position:])
            problem = f"{shown}: {named}; ROCm's runtime stops there and does not show {hidden}"
            return Visible(tuple(found), problem, _remedy(LOWER, devices))
        found.append(named)
    if len(entries) > len(devices):
        problem = f"{shown} has {len(entries)} entries for {len(devices)} devices; ROCm's runtime reads no more"
        return Visible(tuple(found), problem, _remedy(LOWER, devices))
    return Visible(tuple(found))


def _named_in_lower(entry: str, devices: Sequence[RocmDevice]) -> RocmDevice | str:
    """What an entry names, or what is wrong with it. It is in capitals."""
    if entry.startswith("G"):
        fitting = [device for device in devices if (device.uuid or "").upper().startswith(entry)]
        if len(entry) > len("GPU-") and len(fitting) == 1:
            return fitting[0]
        return f"{entry!r} is the beginning of {len(fitting) or 'no'} {'UUIDs' if fitting else 'UUID'}"
    number = re.fullmatch(r"\+?(0X[0-9A-F]+|0[0-7]*|[1-9]\d*)", entry)  # as C writes numbers
    if number is None:
        return f"{entry!r} is neither a number nor a UUID (GPU-...)"
    digits = number[1]
    position = int(digits, 16 if digits.startswith("0X") else 8 if digits.startswith("0") else 10)
    return devices[position] if position < len(devices) else f"there is no device {position}, of {len(devices)}"


def _shown_by_hip(devices: Sequence[RocmDevice], environ: Mapping[str, str]) -> Visible:
    """What HIP shows of those that the library below it has left."""
    variable = VARIABLE if environ.get(VARIABLE) else OTHER
    text = environ.get(variable)
    if not text:
        return Visible(tuple(devices))
    entries = text.removesuffix(",").split(",")
    found: list[RocmDevice] = []
    for position, entry in enumerate(entries):
        named = _named_to_hip(entry, devices)
        if isinstance(named, str):
            hidden = ", ".join(repr(other) for other in entries[position:])
            problem = f"{variable}={text!r}: {named}; HIP stops there and does not show {hidden}"
            return Visible(tuple(found), problem, _remedy(variable, devices))
        if named not in found:
            found.append(named)
    if environ.get(OTHER) and environ[OTHER] != text:
        problem = f"{describe_variables(environ)}: HIP reads {VARIABLE} alone, and not {OTHER}"
        return Visible(tuple(found), problem, f"Unset {OTHER}, or set both to the same list.")
    return Visible(tuple(found))


def _named_to_hip(entry: str, devices: Sequence[RocmDevice]) -> RocmDevice | str:
    """What an entry names, or what is wrong with it."""
    if "GPU-" in entry:
        fitting = next((device for device in devices if entry in (device.uuid or "GPU-XX")), None)
        return fitting or f"{entry!r} is part of no device's UUID"
    if not re.fullmatch(r"0|[1-9]\d*", entry):
        return f"{entry!r} is neither a plain number nor a UUID (GPU-...)"
    return devices[int(entry)] if int(entry) < len(devices) else f"there is no device {entry}, of {len(devices)}"


def _counted_by_torch(seen: Visible, environ: Mapping[str, str]) -> Visible:
    """What torch makes of that. It reads the lists for itself."""
    lower, own, other = (environ.get(name) for name in VARIABLES)
    if lower is not None and own is not None and len(own.split(",")) > len(lower.split(",")):
        problem = f"{describe_variables(environ)}: torch refuses a list for HIP that is longer than the other"
        return Visible((), problem, f"{VARIABLE} counts what {LOWER} has left: unset one of them.")
    text = own if own is not None else None if lower is not None else other
    if text is not None:
        entries = [entry.strip() for entry in text.split(",")]
        if not text.strip():
            name = VARIABLE if own is not None else OTHER
            return Visible((), f"{name}={text!r} hides every device from torch", _UNSET)
        if len(set(entries)) < len(entries):
            return Visible(
                (), f"{describe_variables(environ)} names a device twice: torch then counts none", "Name each once."
            )
    elif lower is not None and other and len(lower.split(",")) != len(seen.devices) and seen.problem is None:
        problem = f"{describe_variables(environ)}: torch counts the entries of {LOWER}, HIP shows {len(seen.devices)}"
        return Visible(seen.devices, problem, f"Set {VARIABLE} in place of {OTHER}.")
    return seen


def _remedy(variable: str, devices: Sequence[RocmDevice]) -> str:
    numbers = "0" if len(devices) == 1 else f"0 to {len(devices) - 1}"
    return f"List devices by number ({numbers}) or by UUID as rocminfo shows them, or unset {variable}."
