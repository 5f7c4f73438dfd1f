"""ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES are resolved like by ROCm, HIP and torch."""

from __future__ import annotations

import dataclasses

import pytest
from platforms.rocm.tests.machines import MI300X, uuid_of

from mvllm_rocm import visible_devices
from mvllm_rocm.topology import read_inventory

UUIDS = [uuid_of(n) for n in range(4)]


@pytest.fixture
def see(machine):
    """`see(rocr=..., hip=..., cuda=...)`: the visible ones of four devices; None leaves a variable unset."""

    def seen(*, rocr=None, hip=None, cuda=None, devices=(MI300X,) * 4):
        machine(*devices)
        lists = dict(zip(visible_devices.VARIABLES, (rocr, hip, cuda), strict=True))
        return visible_devices.resolve(
            read_inventory(), {name: text for name, text in lists.items() if text is not None}
        )

    return seen


def numbers(found):
    return [device.index for device in found.devices]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"rocr": "2"}, [2]),
        ({"rocr": "3, 1"}, [3, 1]),
        ({"rocr": "0x2,01"}, [2, 1]),
        ({"rocr": f"{UUIDS[3]},0"}, [3, 0]),
        ({"rocr": UUIDS[1].upper()}, [1]),
        ({"rocr": UUIDS[2][:14]}, [2]),
        ({"hip": "2,0"}, [2, 0]),
        ({"hip": "1,"}, [1]),
        ({"hip": UUIDS[3]}, [3]),
        ({"cuda": "2,0"}, [2, 0]),
        ({"hip": "1,2", "cuda": "1,2"}, [1, 2]),
        ({"rocr": "3,1", "hip": "1"}, [1]),  # HIP numbers the devices that ROCR selects
        ({"rocr": "3,1", "hip": UUIDS[3]}, [3]),
        ({"rocr": "3,1", "cuda": "1,0"}, [1, 3]),
    ],
    ids=str,
)
def test_valid_lists(see, lists, expected):
    found = see(**lists)
    assert numbers(found) == expected and found.problem is None and found.remedy is None


@pytest.mark.parametrize(
    ("lists", "expected", "message"),
    [
        ({"rocr": ""}, [], "ROCR_VISIBLE_DEVICES='' hides every device"),
        ({"rocr": "0,7,1"}, [0], "there is no device 7, of 4; ROCm's runtime stops there and does not show '7', '1'"),
        ({"rocr": "1,1,2"}, [1], "'1' is named again"),
        ({"rocr": f"1,{UUIDS[1]},0"}, [1], "is named again"),
        ({"rocr": "-1"}, [], "'-1' is neither a number nor a UUID"),
        ({"rocr": "GPU-ab10"}, [], "the beginning of 4 UUIDs"),
        ({"rocr": "2,GPU-ff"}, [2], "the beginning of no UUID"),
        ({"rocr": "0,,1"}, [], "an empty entry, at which ROCm's runtime fails"),
        ({"rocr": "0,1,2,3,0"}, [0, 1, 2, 3], "5 entries for 4 devices"),
        ({"hip": "0,7,1"}, [0], "HIP_VISIBLE_DEVICES='0,7,1': there is no device 7, of 4; HIP stops there"),
        ({"hip": "-1"}, [], "'-1' is neither a plain number nor a UUID"),
        ({"hip": "0, 1"}, [0], "' 1' is neither a plain number"),
        ({"hip": "GPU-FF"}, [], "'GPU-FF' is part of no device's UUID"),
        ({"cuda": "1,x"}, [1], "CUDA_VISIBLE_DEVICES='1,x': 'x' is neither"),
        ({"rocr": "2", "hip": "2"}, [], "there is no device 2, of 1"),
    ],
    ids=str,
)
def test_lists_that_are_cut_short(see, lists, expected, message):
    found = see(**lists)
    assert numbers(found) == expected
    assert message in found.problem and found.remedy


@pytest.mark.parametrize(
    ("lists", "expected", "message"),
    [
        # HIP_VISIBLE_DEVICES has priority over CUDA_VISIBLE_DEVICES.
        ({"hip": "1", "cuda": "0,2"}, [1], "HIP reads HIP_VISIBLE_DEVICES alone, and not CUDA_VISIBLE_DEVICES"),
        # HIP ignores an empty list; torch then counts no device.
        ({"hip": ""}, [], "HIP_VISIBLE_DEVICES='' hides every device from torch"),
        ({"cuda": ""}, [], "CUDA_VISIBLE_DEVICES='' hides every device from torch"),
        ({"hip": "", "cuda": "1"}, [], "HIP_VISIBLE_DEVICES='' hides every device from torch"),
        # Torch counts no device if one is listed twice, and fails if the HIP list is longer than the ROCR list.
        ({"hip": "1,1"}, [], "names a device twice: torch then counts none"),
        ({"cuda": "0,1,0"}, [], "names a device twice"),
        ({"rocr": "2", "hip": "0,1"}, [], "torch rejects a list for HIP that is longer"),
        # HIP reads CUDA_VISIBLE_DEVICES even if ROCR_VISIBLE_DEVICES is set, torch does not.
        ({"rocr": "2,3", "cuda": "1"}, [3], "torch counts the entries of ROCR_VISIBLE_DEVICES, HIP shows 1"),
    ],
    ids=str,
)
def test_contradictory_lists(see, lists, expected, message):
    found = see(**lists)
    assert numbers(found) == expected
    assert message in found.problem and found.remedy


def test_the_remedy_names_the_valid_entries(see):
    assert "(0 to 3)" in see(hip="9").remedy and "(0)" in see(rocr="9", devices=(MI300X,)).remedy
    assert "(0 to 1)" in see(rocr="2,3", hip="2").remedy, "what the first list has left"


def test_devices_without_a_uuid_are_listed_by_number(see):
    nameless = (dataclasses.replace(MI300X, identity=0),) * 2
    assert numbers(see(hip="1", devices=nameless)) == [1]
    assert numbers(see(rocr="GPU-0000", devices=nameless)) == []


def test_numbers_count_only_devices_that_can_be_opened(see):
    closed = dataclasses.replace(MI300X, opens=False)
    found = see(hip="1", devices=(MI300X, closed, MI300X))
    assert [device.uuid for device in found.devices] == [uuid_of(2)]
