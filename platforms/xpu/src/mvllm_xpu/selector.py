"""Parser of ONEAPI_DEVICE_SELECTOR, by which SYCL selects from the devices that Level Zero shows.

    term ; term ; ...      term    = [!] backend : device , device , ...
                           backend = level_zero, opencl, ... or * for any
                           device  = number, gpu, cpu, ... or *; the suffix .number or .* selects its tiles

A device is selected if a term without `!` names it and no term with `!` does. Terms with `!` come last; if there are no
others, they apply to all devices. Letter case does not matter, blanks do. The order of terms does not change the order
of devices. SYCL fails at a selector that it cannot parse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VARIABLE = "ONEAPI_DEVICE_SELECTOR"
OURS = "level_zero"

_BACKENDS = frozenset({OURS, "opencl", "cuda", "hip", "native_cpu", "offload", "host", "*"})
_TYPES = frozenset({"gpu", "cpu", "fpga", "acc", "mca", "npu", "host", "*"})
_NUMBER = re.compile(r"\s*[+-]?\d+")  # C++ ignores text after the number


class SelectorError(Exception):
    """SYCL cannot parse the selector."""


@dataclass(frozen=True)
class Target:
    """One device of a term with the backend `level_zero` or `*`.

    Attributes:
        text: Text of the device in the selector.
        discards: The term has a `!`.
        kind: `gpu`, another type, or `*`; empty if there is a number.
        number: Number of the device among those that Level Zero shows.
        tile: Number of a tile, or `*` for each one; None for the whole device.
    """

    text: str
    discards: bool
    kind: str
    number: int | None = None
    tile: int | str | None = None

    def names(self, number: int) -> bool:
        """Whether the target includes the device with this number; all Level Zero devices here are GPUs."""
        return self.kind in ("gpu", "*") or self.number == number


def parse(text: str) -> list[Target]:
    """The targets of Level Zero's devices; if all terms have a `!`, with a target for all devices.

    Raises:
        SelectorError: SYCL cannot parse it.
    """
    targets: list[Target] = []
    num_all = num_discarding = 0
    for term in filter(None, text.lower().split(";")):
        backend, devices = _halves(term)
        discards = backend.startswith("!")
        if backend.removeprefix("!") not in _BACKENDS:
            raise SelectorError(f"{backend!r} is no backend (level_zero, opencl, cuda, hip, *)")
        for device in filter(None, devices.split(",")):
            if num_discarding and not discards:
                raise SelectorError(f"{term!r} comes after a term with '!'; those come last")
            num_all += 1
            num_discarding += discards
            target = _target(device, discards)
            if backend.removeprefix("!") in (OURS, "*"):
                targets.append(target)
    if num_discarding == num_all:
        targets.append(Target("*:*", False, "*"))
    return targets


def _halves(term: str) -> tuple[str, str]:
    parts = term.split(":")
    if len(parts) != 2 or not all(parts):
        raise SelectorError(f"{term!r} is not of the form backend:device, such as level_zero:0")
    return parts[0], parts[1]


def _target(text: str, discards: bool) -> Target:
    parts = text.split(".")
    if not all(parts) or len(parts) > 3:
        raise SelectorError(f"{text!r} is not a device: a number, gpu or *, optionally followed by a point and a tile")
    kind = parts[0] if parts[0] in _TYPES else ""
    number = None if kind else _number(parts[0])
    if len(parts) == 1:
        return Target(text, discards, kind, number)
    if kind not in ("", "*"):
        raise SelectorError(f"{text!r}: tiles are those of a number or of *, not of a type")
    if parts[1].startswith("*"):
        tile: int | str = "*"
    elif kind == "*":
        raise SelectorError(f"{text!r}: only .* can follow *")
    else:
        tile = _number(parts[1])
    if len(parts) == 3:
        raise SelectorError(f"{text!r} names parts of a tile, which drivers no longer show")
    return Target(text, discards, kind, number, tile)


def _number(text: str) -> int:
    found = _NUMBER.match(text)
    if found is None:
        raise SelectorError(f"{text!r} is neither a number nor gpu nor *")
    return int(found[0])
