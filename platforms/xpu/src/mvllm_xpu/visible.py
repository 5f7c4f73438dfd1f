"""Which devices torch will count, and in which order, worked out without Level Zero.

Three steps narrow down what there is. The driver shows cards, or each tile of a card as a device, as
ZE_FLAT_DEVICE_HIERARCHY says; ZE_AFFINITY_MASK hides some of these; ONEAPI_DEVICE_SELECTOR leaves some of what is shown
then, and counts these anew. Last, torch leaves out processors' GPUs where there is a card.

    two cards of two tiles     COMPOSITE    0            1            FLAT, COMBINED   0    1    2    3
    ZE_AFFINITY_MASK           "1"                       1            "1,2"                 1    2
                               "1.0"                     1, tile 0    "1.0"            passed over
    ONEAPI_DEVICE_SELECTOR     level_zero:0              1            level_zero:1               2

No list changes the order. The driver passes over what is not there, and fails at what is no number; an empty mask is
none. SYCL fails at a selector that it cannot read; an empty one is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mvllm_xpu import selector
from mvllm_xpu.topology import Inventory, XpuDevice

HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
MASK = "ZE_AFFINITY_MASK"
SELECTOR = selector.VARIABLE
VARIABLES = (HIERARCHY, MASK, SELECTOR)

FLAT, COMPOSITE, COMBINED = "FLAT", "COMPOSITE", "COMBINED"

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)")  # as C reads numbers


@dataclass(frozen=True)
class CountedDevice:
    """What torch counts as one device.

    Attributes:
        device: The card, or the processor's GPU.
        tiles: Those of it that are shown.
    """

    device: XpuDevice
    tiles: tuple[int, ...]

    @property
    def name(self) -> str:
        """For people."""
        if len(self.tiles) == self.device.tiles:
            return self.device.name
        what = "tile" if len(self.tiles) == 1 else "tiles"
        return f"{self.device.name} ({what} {', '.join(map(str, self.tiles))})"

    @property
    def memory_bytes(self) -> int | None:
        """Of these tiles; None where it is the host's, or not told."""
        total = self.device.memory_bytes
        return None if total is None else total // self.device.tiles * len(self.tiles)


@dataclass(frozen=True)
class Visible:
    """What a process sees.

    Attributes:
        devices: In torch's order.
        problem: What is wrong with the variables, or why nothing is seen although there is something; None if all is
            well.
        remedy: What to do about it.
    """

    devices: tuple[CountedDevice, ...]
    problem: str | None = None
    remedy: str | None = None


@dataclass
class _Notes:
    """Problems on the way, each with its remedy."""

    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, problem: str, remedy: str) -> None:
        self.problems.append((problem, remedy))

    def of(self, devices: Sequence[CountedDevice]) -> Visible:
        if not self.problems:
            return Visible(tuple(devices))
        return Visible(tuple(devices), "; ".join(what for what, _ in self.problems), self.problems[0][1])


def resolve(inventory: Inventory, environ: Mapping[str, str]) -> Visible:
    """The devices that a process with these variables sees through torch."""
    notes = _Notes()
    shown = _left_by_driver(inventory.devices, environ, notes)
    if shown:
        shown = _left_by_sycl(shown, environ, notes)
    if any(not each.device.integrated for each in shown):
        shown = [each for each in shown if not each.device.integrated]
    return notes.of(shown)


def describe_variables(environ: Mapping[str, str]) -> str:
    """The variables that are set, for people; empty without any."""
    return ", ".join(f"{name}={environ[name]!r}" for name in VARIABLES if name in environ)


def hierarchy(devices: Sequence[XpuDevice], environ: Mapping[str, str]) -> str:
    """FLAT, COMPOSITE or COMBINED: what is set, or else what the driver takes for the first device."""
    wanted = environ.get(HIERARCHY)
    if wanted in (FLAT, COMPOSITE, COMBINED):
        return str(wanted)
    return FLAT if devices and devices[0].chip.flat else COMPOSITE


def _left_by_driver(devices: Sequence[XpuDevice], environ: Mapping[str, str], notes: _Notes) -> list[CountedDevice]:
    """What the driver shows."""
    wanted, mode = environ.get(HIERARCHY), hierarchy(devices, environ)
    if wanted and wanted != mode:
        notes.add(
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
    remedy = _remedy(MASK, len(all_shown))
    enabled: list[set[int]] = [set() for _ in all_shown]
    order: list[int] = []
    for entry in text.removesuffix(",").split(","):
        numbers = [_number(part) for part in entry.split(".")]
        if None in numbers or len(numbers) > 3 or (len(numbers) == 3 and mode == COMPOSITE):
            notes.add(f"{MASK}={text!r}: {entry!r} is no number of a device, at which the driver fails", remedy)
            return []
        number, *tiles = (each for each in numbers if each is not None)
        if not 0 <= number < len(all_shown):
            notes.add(f"{MASK}={text!r}: there is no device {entry.strip()}, of {len(all_shown)}", remedy)
        elif tiles and mode != COMPOSITE:
            meaning = f"with {HIERARCHY}={mode}, each tile is a device of its own"
            notes.add(f"{MASK}={text!r}: {entry.strip()!r} is passed over: {meaning}", remedy)
        elif tiles and tiles[0] not in all_shown[number].tiles:
            notes.add(f"{MASK}={text!r}: the device {number} has no tile {tiles[0]}", remedy)
        else:
            enabled[number].update(tiles or all_shown[number].tiles)
            order.append(number)
    left = [
        CountedDevice(each.device, tuple(sorted(tiles)))
        for each, tiles in zip(all_shown, enabled, strict=True)
        if tiles
    ]
    if not left:
        notes.add(f"{MASK}={text!r} hides every device", remedy)
    _check_order(f"{MASK}={text!r}", order, notes)
    return left


def _left_by_sycl(devices: Sequence[CountedDevice], environ: Mapping[str, str], notes: _Notes) -> list[CountedDevice]:
    """What the selector leaves of what the driver shows."""
    text = environ.get(SELECTOR)
    if not text:
        return list(devices)
    said = f"{SELECTOR}={text!r}"
    remedy = _remedy(SELECTOR, len(devices), "level_zero:")
    try:
        targets = selector.parse(text)
    except selector.SelectorError as e:
        notes.add(f"{said}: {e}; SYCL fails there", remedy)
        return []
    among = f"{len(devices)} that {MASK}={environ[MASK]!r} leaves" if environ.get(MASK) else str(len(devices))
    for target in targets:
        if target.number is not None and not 0 <= target.number < len(devices):
            notes.add(f"{said}: there is no device {target.number}, of {among}", remedy)
        elif target.discards and target.tile is not None:
            notes.add(f"{said}: {target.text!r} discards tiles, which SYCL does not", remedy)
    left: list[CountedDevice] = []
    for number, each in enumerate(devices):
        named = [target for target in targets if target.names(number)]
        if any(target.discards and target.tile is None for target in named):
            continue
        accepted = [target for target in named if not target.discards]
        if any(target.tile is None for target in accepted):
            left.append(each)
        left += _tiles(each, [target for target in accepted if target.tile is not None], said, remedy, notes)
    if not left:
        notes.add(f"{said} leaves no device of Level Zero, and torch uses no other", remedy)
    _check_order(said, [target.number for target in targets if target.number is not None], notes)
    return left


def _tiles(
    shown: CountedDevice, targets: Sequence[selector.Target], said: str, remedy: str, notes: _Notes
) -> list[CountedDevice]:
    """The tiles of a device that targets ask for, as devices of their own."""
    wanted: set[int] = set()
    for target in targets:
        of_it = range(len(shown.tiles)) if len(shown.tiles) > 1 else range(0)  # one tile alone is no part of a device
        chosen = set(of_it) if target.tile == "*" else {target.tile} & set(of_it)
        if not chosen:
            notes.add(f"{said}: {shown.name} is shown without tiles, or without that of {target.text!r}", remedy)
        wanted |= {tile for tile in chosen if isinstance(tile, int)}
    return [CountedDevice(shown.device, (shown.tiles[tile],)) for tile in sorted(wanted)]


def _check_order(said: str, numbers: Sequence[int], notes: _Notes) -> None:
    if list(numbers) != sorted(numbers):
        notes.add(f"{said} does not change the order of devices", "List devices in ascending order.")


def _number(text: str) -> int | None:
    found = _NUMBER.match(text)
    if found is None:
        return None
    sign, digits = found[1], found[2]
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if sign == "-" else 1)


def _remedy(variable: str, count: int, prefix: str = "") -> str:
    numbers = f"{prefix}0" if count == 1 else f"{prefix}0 to {count - 1}"
    return f"List devices by number ({numbers}), or unset {variable}."
