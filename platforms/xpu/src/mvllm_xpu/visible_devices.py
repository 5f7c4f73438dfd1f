"""The devices that torch counts, in torch's order, computed from environment variables without loading Level Zero.

The driver shows cards, or each tile of a card as a device, depending on ZE_FLAT_DEVICE_HIERARCHY. ZE_AFFINITY_MASK
hides some of them. ONEAPI_DEVICE_SELECTOR selects from the rest and renumbers them. Last, torch leaves out integrated
GPUs if there is a card.

    two cards of two tiles     COMPOSITE    0            1            FLAT, COMBINED   0    1    2    3
    ZE_AFFINITY_MASK           "1"                       1            "1,2"                 1    2
                               "1.0"                     1, tile 0    "1.0"            skipped
    ONEAPI_DEVICE_SELECTOR     level_zero:0              1            level_zero:1               2

No list changes the order. The driver skips numbers of devices that do not exist and fails at entries that are not
numbers. SYCL fails at a selector that it cannot parse. An empty mask or selector counts as unset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mvllm_torch_gpu.device_discovery import Inventory, VisibleDevices, device_list_remedy
from mvllm_xpu import selector
from mvllm_xpu.topology import XpuDevice

HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
MASK = "ZE_AFFINITY_MASK"
SELECTOR = selector.VARIABLE
VARIABLES = (HIERARCHY, MASK, SELECTOR)

FLAT, COMPOSITE, COMBINED = "FLAT", "COMPOSITE", "COMBINED"

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)")  # an integer in C's syntax


@dataclass(frozen=True)
class CountedDevice:
    """One device in torch's count.

    Attributes:
        device: The card, or the integrated GPU.
        tiles: Its visible tiles.
    """

    device: XpuDevice
    tiles: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        if len(self.tiles) == self.device.tiles:
            return self.device.name
        what = "tile" if len(self.tiles) == 1 else "tiles"
        return f"{self.device.name} ({what} {', '.join(map(str, self.tiles))})"

    @property
    def memory_bytes(self) -> int | None:
        """Memory of these tiles; None if it is the host's memory or unknown."""
        total = self.device.memory_bytes
        return None if total is None else total // self.device.tiles * len(self.tiles)


@dataclass
class _Problems:
    """Problems found so far, each with its remedy."""

    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, problem: str, remedy: str) -> None:
        self.found.append((problem, remedy))

    def result(self, devices: Sequence[CountedDevice]) -> VisibleDevices[CountedDevice]:
        if not self.found:
            return VisibleDevices(tuple(devices))
        return VisibleDevices(tuple(devices), "; ".join(text for text, _ in self.found), self.found[0][1])


def resolve(inventory: Inventory[XpuDevice], environ: Mapping[str, str]) -> VisibleDevices[CountedDevice]:
    """The devices that a process with these environment variables sees through torch."""
    problems = _Problems()
    shown = _shown_by_driver(inventory.devices, environ, problems)
    if shown:
        shown = _selected_by_sycl(shown, environ, problems)
    if any(not each.device.integrated for each in shown):
        shown = [each for each in shown if not each.device.integrated]
    return problems.result(shown)


def hierarchy(devices: Sequence[XpuDevice], environ: Mapping[str, str]) -> str:
    """FLAT, COMPOSITE or COMBINED: the value that is set, or the driver's default for the first device."""
    wanted = environ.get(HIERARCHY)
    if wanted in (FLAT, COMPOSITE, COMBINED):
        return str(wanted)
    return FLAT if devices and devices[0].chip.flat else COMPOSITE


def _shown_by_driver(
    devices: Sequence[XpuDevice], environ: Mapping[str, str], problems: _Problems
) -> list[CountedDevice]:
    """The devices that the driver shows."""
    wanted, mode = environ.get(HIERARCHY), hierarchy(devices, environ)
    if wanted and wanted != mode:
        problems.add(
            f"{HIERARCHY}={wanted!r} is not one of {FLAT}, {COMPOSITE}, {COMBINED}; the driver takes {mode}",
            f"Set it to one of these, or unset {HIERARCHY}.",
        )
    whole = [CountedDevice(device, tuple(range(device.tiles))) for device in devices]
    all_shown = (
        whole if mode == COMPOSITE else [CountedDevice(each.device, (tile,)) for each in whole for tile in each.tiles]
    )
    text = environ.get(MASK)
    if not text or text == "default":
        return all_shown
    remedy = device_list_remedy(MASK, len(all_shown))
    enabled: list[set[int]] = [set() for _ in all_shown]
    order: list[int] = []
    for entry in text.removesuffix(",").split(","):
        numbers = [_number(part) for part in entry.split(".")]
        if None in numbers or len(numbers) > 3 or (len(numbers) == 3 and mode == COMPOSITE):
            problems.add(f"{MASK}={text!r}: {entry!r} is not a device number, and the driver fails there", remedy)
            return []
        number, *tiles = (each for each in numbers if each is not None)
        if not 0 <= number < len(all_shown):
            problems.add(f"{MASK}={text!r}: there is no device {entry.strip()}, of {len(all_shown)}", remedy)
        elif tiles and mode != COMPOSITE:
            meaning = f"with {HIERARCHY}={mode}, each tile is a device of its own"
            problems.add(f"{MASK}={text!r}: {entry.strip()!r} is skipped: {meaning}", remedy)
        elif tiles and tiles[0] not in all_shown[number].tiles:
            problems.add(f"{MASK}={text!r}: the device {number} has no tile {tiles[0]}", remedy)
        else:
            enabled[number].update(tiles or all_shown[number].tiles)
            order.append(number)
    left = [
        CountedDevice(each.device, tuple(sorted(tiles)))
        for each, tiles in zip(all_shown, enabled, strict=True)
        if tiles
    ]
    if not left:
        problems.add(f"{MASK}={text!r} hides every device", remedy)
    _check_order(f"{MASK}={text!r}", order, problems)
    return left


def _selected_by_sycl(
    devices: Sequence[CountedDevice], environ: Mapping[str, str], problems: _Problems
) -> list[CountedDevice]:
    """The devices that the selector selects among those that the driver shows."""
    text = environ.get(SELECTOR)
    if not text:
        return list(devices)
    said = f"{SELECTOR}={text!r}"
    remedy = device_list_remedy(SELECTOR, len(devices), prefix="level_zero:")
    try:
        targets = selector.parse(text)
    except selector.SelectorError as e:
        problems.add(f"{said}: {e}; SYCL fails there", remedy)
        return []
    among = f"{len(devices)} that {MASK}={environ[MASK]!r} leaves" if environ.get(MASK) else str(len(devices))
    for target in targets:
        if target.number is not None and not 0 <= target.number < len(devices):
            problems.add(f"{said}: there is no device {target.number}, of {among}", remedy)
        elif target.discards and target.tile is not None:
            problems.add(f"{said}: {target.text!r} discards tiles, which SYCL does not", remedy)
    left: list[CountedDevice] = []
    for number, each in enumerate(devices):
        named = [target for target in targets if target.names(number)]
        if any(target.discards and target.tile is None for target in named):
            continue
        accepted = [target for target in named if not target.discards]
        if any(target.tile is None for target in accepted):
            left.append(each)
        left += _tiles(each, [target for target in accepted if target.tile is not None], said, remedy, problems)
    if not left:
        problems.add(f"{said} leaves no device of Level Zero, and torch uses no other", remedy)
    _check_order(said, [target.number for target in targets if target.number is not None], problems)
    return left


def _tiles(
    shown: CountedDevice, targets: Sequence[selector.Target], said: str, remedy: str, problems: _Problems
) -> list[CountedDevice]:
    """The tiles of a device that targets select, as separate devices."""
    wanted: set[int] = set()
    for target in targets:
        of_it = range(len(shown.tiles)) if len(shown.tiles) > 1 else range(0)  # else no sub-devices
        chosen = set(of_it) if target.tile == "*" else {target.tile} & set(of_it)
        if not chosen:
            problems.add(f"{said}: {shown.name} is shown without tiles, or without that of {target.text!r}", remedy)
        wanted |= {tile for tile in chosen if isinstance(tile, int)}
    return [CountedDevice(shown.device, (shown.tiles[tile],)) for tile in sorted(wanted)]


def _check_order(said: str, numbers: Sequence[int], problems: _Problems) -> None:
    if list(numbers) != sorted(numbers):
        problems.add(f"{said} does not change the order of devices", "List devices in ascending order.")


def _number(text: str) -> int | None:
    found = _NUMBER.match(text)
    if found is None:
        return None
    sign, digits = found[1], found[2]
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if sign == "-" else 1)
