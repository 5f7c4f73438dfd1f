"""Targets (names of instruction sets such as gfx942): which are supported, and their properties.

The kernel driver reports a number whose last two pairs of digits are the minor version and the stepping; the name has
these in hexadecimal:

    90010 -> 9.0.10 -> gfx90a        90402 -> 9.4.2 -> gfx942        110001 -> 11.0.1 -> gfx1101
"""

from __future__ import annotations

import re

NEEDED = "gfx90a, gfx942, gfx950 or another of the gfx94x and gfx95x, or gfx11 and newer"
"""Supported targets, for messages."""

_INTEGRATED = frozenset(
    f"gfx{name}"  # integrated GPUs
    for name in ("902", "909", "90c", "1013", "1033", "1035", "1036", "1037", "1103", "1150", "1151", "1152", "1153")
)
_INTEGRATED_CHIPS = frozenset({0x74A0})
"""PCI device ids of integrated chips whose target also has discrete cards: MI300A."""


def name_of(version: int) -> str:
    """The target with the driver's number `version`."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def parts(name: str) -> tuple[int, int, int]:
    """(major, minor, stepping) of a target; device features after a colon are ignored.

    Raises:
        ValueError: It is not a target's name.
    """
    found = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", name.partition(":")[0])
    if found is None:
        raise ValueError(f"{name!r} is not a target name such as gfx942.")
    return int(found[1]), int(found[2], 16), int(found[3], 16)


def is_supported(name: str) -> bool:
    """Whether the kernels can be compiled for a target: it needs matrix units for bfloat16."""
    try:
        major, *rest = parts(name)
    except ValueError:
        return False
    return major >= 11 or (major == 9 and (rest == [0, 10] or rest[0] in (4, 5)))


def float8(name: str) -> str:
    """Torch's name of the float8 format with three bits of mantissa in which a target computes."""
    return "float8_e4m3fnuz" if parts(name)[:2] == (9, 4) else "float8_e4m3fn"


def multiplies_float8(name: str) -> bool:
    """Whether a target multiplies in its float8 format."""
    major, minor, _ = parts(name)
    return major >= 12 or (major == 9 and minor in (4, 5))


def is_integrated(name: str, chip: int) -> bool:
    """Whether a device uses the host's memory.

    Args:
        name: The device's target.
        chip: The device's PCI device id.
    """
    return name in _INTEGRATED or chip in _INTEGRATED_CHIPS
