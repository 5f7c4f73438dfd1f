"""Intel GPU models by PCI id: names and properties.

Only properties that the probe needs without a driver are here: whether torch supports a chip, whether it has its own
memory, and the number of tiles of a card if the kernel's driver does not report it.
"""

from __future__ import annotations

from dataclasses import dataclass

NEEDED = "an Arc or Data Center GPU Flex or Max, or the graphics of a Core Ultra processor"
"""Supported chips, for messages."""


@dataclass(frozen=True)
class Chip:
    """Properties of a chip.

    Attributes:
        family: Architecture.
        name: Product name; None if it has none.
        integrated: Whether it is part of a processor and uses the host's memory.
        supported: Whether torch supports it.
        tiles: Default number of tiles of a card.
        flat: Whether its driver shows tiles instead of cards by default.
    """

    family: str
    name: str | None = None
    integrated: bool = False
    supported: bool = True
    tiles: int = 1
    flat: bool = False


_ARC_A = {
    0x5690: "Arc A770M",
    0x5691: "Arc A730M",
    0x5692: "Arc A550M",
    0x5693: "Arc A370M",
    0x5694: "Arc A350M",
    0x5696: "Arc A570M",
    0x5697: "Arc A530M",
    0x56A0: "Arc A770",
    0x56A1: "Arc A750",
    0x56A2: "Arc A580",
    0x56A5: "Arc A380",
    0x56A6: "Arc A310",
    0x56AF: "Arc A760A",
    0x56B0: "Arc Pro A30M",
    0x56B1: "Arc Pro A40/A50",
    0x56B2: "Arc Pro A60M",
    0x56B3: "Arc Pro A60",
    0x56C0: "Data Center GPU Flex 170",
    0x56C1: "Data Center GPU Flex 140",
    0x56C2: "Data Center GPU Flex 170V",
}
_ARC_B = {0xE20B: "Arc B580", 0xE20C: "Arc B570", 0xE211: "Arc Pro B60", 0xE212: "Arc Pro B50"}
_MAX = {  # names, and tiles of a card
    0x0B69: ("Data Center GPU Max 1450", 2),
    0x0B6E: ("Data Center GPU Max 1100C", 1),
    0x0BD0: ("Data Center GPU Max", 2),
    0x0BD4: ("Data Center GPU Max 1550VG", 2),
    0x0BD5: ("Data Center GPU Max 1550", 2),
    0x0BD6: ("Data Center GPU Max 1550", 2),
    0x0BD7: ("Data Center GPU Max 1350", 2),
    0x0BD8: ("Data Center GPU Max 1350", 2),
    0x0BD9: ("Data Center GPU Max 1100", 1),
    0x0BDA: ("Data Center GPU Max 1100", 1),
    0x0BDB: ("Data Center GPU Max 1100", 1),
}

# Ids of a family are contiguous. The first range that contains an id applies.
_FAMILIES: tuple[tuple[int, int, Chip], ...] = (
    (0x5690, 0x56BF, Chip("Xe-HPG", "Arc A-series")),
    (0x56C0, 0x56CF, Chip("Xe-HPG", "Data Center GPU Flex")),
    (0x4F80, 0x4F8F, Chip("Xe-HPG", "Arc A-series")),
    (0xE200, 0xE22F, Chip("Xe2", "Arc B-series")),
    (0x7D40, 0x7D6F, Chip("Xe-LPG", "Core Ultra graphics", integrated=True)),
    (0x7DD0, 0x7DDF, Chip("Xe-LPG", "Core Ultra graphics", integrated=True)),
    (0x6420, 0x64BF, Chip("Xe2", "Core Ultra graphics", integrated=True)),
    (0xB080, 0xB0BF, Chip("Xe3", "Core Ultra graphics", integrated=True)),
    (0xFD80, 0xFD8F, Chip("Xe3", "Core Ultra graphics", integrated=True)),
    (0x4905, 0x4909, Chip("Xe-LP", "Iris Xe MAX", supported=False)),
    (0x9A40, 0x9AFF, Chip("Xe-LP", "Iris Xe graphics", integrated=True, supported=False)),
    (0x4C80, 0x4C9F, Chip("Xe-LP", "UHD graphics", integrated=True, supported=False)),
    (0x4620, 0x46DF, Chip("Xe-LP", "UHD or Iris Xe graphics", integrated=True, supported=False)),
    (0xA720, 0xA7AF, Chip("Xe-LP", "UHD or Iris Xe graphics", integrated=True, supported=False)),
)


def of_id(device: int) -> Chip | None:
    """The chip with a PCI device id; None if it is unknown."""
    if device in _MAX:
        name, tiles = _MAX[device]
        return Chip("Xe-HPC", name, tiles=tiles, flat=True)
    found = next((chip for first, last, chip in _FAMILIES if first <= device <= last), None)
    name_of_its_own = (_ARC_A | _ARC_B).get(device)
    if found is None or name_of_its_own is None:
        return found
    return Chip(found.family, name_of_its_own, found.integrated, found.supported, found.tiles, found.flat)


def newer(integrated: bool) -> Chip:
    """Properties of an unlisted newer chip, which the kernel's driver for new chips supports."""
    return Chip("unknown", None, integrated)
