"""ZE_AFFINITY_MASK and ONEAPI_DEVICE_SELECTOR are resolved like by the driver, SYCL and torch."""

from __future__ import annotations

import pytest
from platforms.xpu.tests.machines import B580, GIB, LUNAR_LAKE, MAX_1550, UHD_770

from mvllm_torch_gpu.device_discovery import describe_variables
from mvllm_xpu import visible_devices
from mvllm_xpu.topology import read_inventory

FOUR = (B580,) * 4
TILED = (MAX_1550,) * 2


@pytest.fixture
def see(machine):
    """`see(mask=..., selector=..., hierarchy=..., devices=...)`: the visible devices; None leaves a variable unset."""

    def seen(*, mask=None, selector=None, hierarchy=None, devices=FOUR):
        machine(*devices)
        lists = dict(zip(visible_devices.VARIABLES, (hierarchy, mask, selector), strict=True))
        return visible_devices.resolve(
            read_inventory(), {name: text for name, text in lists.items() if text is not None}
        )

    return seen


def numbers(found):
    return [shown.device.index for shown in found.devices]


def tiles(found):
    return [(shown.device.index, *shown.tiles) for shown in found.devices]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"mask": ""}, [0, 1, 2, 3]),  # an empty mask counts as unset
        ({"mask": "2"}, [2]),
        ({"mask": "1, 3"}, [1, 3]),
        ({"mask": "0x2,"}, [2]),
        ({"mask": "1,1"}, [1]),
        ({"mask": "1.0"}, [1]),  # the only tile
        ({"selector": ""}, [0, 1, 2, 3]),
        ({"selector": "level_zero:1"}, [1]),
        ({"selector": "level_zero:0,3"}, [0, 3]),
        ({"selector": "LEVEL_ZERO:GPU"}, [0, 1, 2, 3]),
        ({"selector": "*:gpu"}, [0, 1, 2, 3]),
        ({"selector": "*:*"}, [0, 1, 2, 3]),
        ({"selector": "*:2"}, [2]),
        ({"selector": "opencl:*;level_zero:1"}, [1]),
        ({"selector": "level_zero:0;level_zero:2"}, [0, 2]),
        ({"selector": "!opencl:*"}, [0, 1, 2, 3]),
        ({"selector": "!level_zero:0"}, [1, 2, 3]),
        ({"selector": "level_zero:*;!level_zero:1,2"}, [0, 3]),
        ({"selector": "level_zero:0;!opencl:gpu"}, [0]),
        ({"mask": "1,3", "selector": "level_zero:1"}, [3]),  # it numbers the devices that the mask leaves
        ({"mask": "2", "selector": "level_zero:gpu"}, [2]),
    ],
    ids=str,
)
def test_valid_lists(see, lists, expected):
    found = see(**lists)
    assert numbers(found) == expected and found.problem is None and found.remedy is None


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, [(0, 0), (0, 1), (1, 0), (1, 1)]),  # this driver shows tiles by default
        ({"hierarchy": "FLAT", "mask": "1,2"}, [(0, 1), (1, 0)]),
        ({"hierarchy": "COMBINED", "mask": "3"}, [(1, 1)]),
        ({"hierarchy": "COMPOSITE"}, [(0, 0, 1), (1, 0, 1)]),
        ({"hierarchy": "COMPOSITE", "mask": "1"}, [(1, 0, 1)]),
        ({"hierarchy": "COMPOSITE", "mask": "0.1"}, [(0, 1)]),
        ({"hierarchy": "COMPOSITE", "mask": "0.1,1.0"}, [(0, 1), (1, 0)]),
        ({"hierarchy": "COMPOSITE", "mask": "1.1,1.0"}, [(1, 0, 1)]),
        ({"hierarchy": "COMPOSITE", "selector": "level_zero:1.0"}, [(1, 0)]),
        ({"hierarchy": "COMPOSITE", "selector": "level_zero:*.*"}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ({"hierarchy": "COMPOSITE", "selector": "level_zero:0,1.1"}, [(0, 0, 1), (1, 1)]),
        ({"hierarchy": "FLAT", "selector": "level_zero:1,3"}, [(0, 1), (1, 1)]),
        ({"hierarchy": "COMPOSITE", "mask": "1", "selector": "level_zero:0.1"}, [(1, 1)]),
    ],
    ids=str,
)
def test_cards_of_several_tiles(see, lists, expected):
    found = see(devices=TILED, **lists)
    assert tiles(found) == expected and found.problem is None


@pytest.mark.parametrize(
    ("lists", "expected", "message"),
    [
        ({"mask": "7"}, [], "there is no device 7, of 4; ZE_AFFINITY_MASK='7' hides every device"),
        ({"mask": "0,7,1"}, [0, 1], "there is no device 7, of 4"),  # skipped; the list continues
        ({"mask": "-1"}, [], "there is no device -1, of 4"),
        ({"mask": "gpu"}, [], "'gpu' is not a device number, and the driver fails there"),
        ({"mask": "0,,1"}, [], "'' is not a device number"),
        ({"mask": "1.4"}, [], "the device 1 has no tile 4"),
        ({"mask": "0.0.0"}, [], "'0.0.0' is not a device number"),
        ({"mask": "3,1"}, [1, 3], "ZE_AFFINITY_MASK='3,1' does not change the order of devices"),
        ({"hierarchy": "flat"}, [0, 1, 2, 3], "is not one of FLAT, COMPOSITE, COMBINED; the driver takes COMPOSITE"),
        ({"hierarchy": "FLAT", "mask": "0.0,1"}, [1], "'0.0' is skipped: with ZE_FLAT_DEVICE_HIERARCHY=FLAT, each"),
        ({"selector": "level_zero"}, [], "'level_zero' is not of the form backend:device"),
        ({"selector": "level_zero:"}, [], "is not of the form"),
        ({"selector": "0,1"}, [], "is not of the form backend:device, such as level_zero:0; SYCL fails there"),
        ({"selector": "levelzero:0"}, [], "'levelzero' is no backend"),
        ({"selector": " level_zero:0"}, [], "' level_zero' is no backend"),
        ({"selector": "level_zero:first"}, [], "'first' is neither a number nor gpu nor *"),
        ({"selector": "level_zero:gpu.0"}, [], "tiles are those of a number or of *"),
        ({"selector": "level_zero:*.0"}, [], "only .* can follow *"),
        ({"selector": "level_zero:0.0.0"}, [], "parts of a tile"),
        ({"selector": "!level_zero:0;level_zero:1"}, [], "comes after a term with '!'"),
        ({"selector": "opencl:*"}, [], "leaves no device of Level Zero, and torch uses no other"),
        ({"selector": "level_zero:cpu"}, [], "leaves no device of Level Zero"),
        ({"selector": "!*:gpu"}, [], "leaves no device of Level Zero"),
        ({"selector": "level_zero:1,9"}, [1], "there is no device 9, of 4"),
        ({"selector": "level_zero:2,1"}, [1, 2], "does not change the order"),
        ({"selector": "level_zero:0.1,2"}, [2], "Arc B580 is shown without tiles"),
        ({"mask": "2", "selector": "level_zero:2"}, [], "there is no device 2, of 1 that ZE_AFFINITY_MASK='2' leaves"),
    ],
    ids=str,
)
def test_invalid_and_contradictory_lists(see, lists, expected, message):
    found = see(**lists)
    assert numbers(found) == expected
    assert message in found.problem and found.remedy


def test_the_remedy_names_the_valid_entries(see):
    assert "(0 to 3)" in see(mask="9").remedy and "(0)" in see(mask="9", devices=(B580,)).remedy
    assert "(level_zero:0 to 1)" in see(mask="2,3", selector="level_zero:2").remedy, "what the mask has left"


def test_a_card_hides_the_integrated_gpu(see):
    assert numbers(see(devices=(UHD_770, B580))) == [0]
    assert see(devices=(UHD_770, B580)).problem is None
    found = see(devices=(LUNAR_LAKE, B580), mask="1")
    assert [shown.name for shown in found.devices] == ["Core Ultra graphics"], "unless the card is hidden"
    assert [shown.name for shown in see(devices=(LUNAR_LAKE,)).devices] == ["Core Ultra graphics"]


def test_tiles_have_names_and_their_share_of_the_memory(see):
    found = see(devices=TILED, hierarchy="COMPOSITE", mask="0,1.1")
    assert [(shown.name, shown.memory_bytes) for shown in found.devices] == [
        ("Data Center GPU Max 1550", 128 * GIB),
        ("Data Center GPU Max 1550 (tile 1)", 64 * GIB),
    ]


def test_the_variables_are_shown_unchanged():
    environ = {"ZE_AFFINITY_MASK": "1", "ONEAPI_DEVICE_SELECTOR": "level_zero:0", "OTHER": "x"}
    assert (
        describe_variables(visible_devices.VARIABLES, environ)
        == "ZE_AFFINITY_MASK='1', ONEAPI_DEVICE_SELECTOR='level_zero:0'"
    )
    assert describe_variables(visible_devices.VARIABLES, {}) == ""
