"""CUDA_VISIBLE_DEVICES is resolved with CUDA's rules."""

from __future__ import annotations

import pytest
from platforms.cuda.tests.fake_nvml import A100, MIG, T4, uuid_of

from mvllm_cuda import visible_devices
from mvllm_cuda.nvml import read_inventory

FOUR = [A100.format(n=0), A100.format(n=1), T4.format(n=2), T4.format(n=3)]
UUIDS = [uuid_of(line) for line in FOUR]


@pytest.fixture
def see(machine):
    """`see(list, *machine)`: the visible devices; with None the variable is unset."""

    def seen(text, *lines):
        machine(*(lines or FOUR))
        return visible_devices.resolve(read_inventory(), {} if text is None else {"CUDA_VISIBLE_DEVICES": text})

    return seen


def parents(found):
    return [device.parent for device in found.devices]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 3 , 1 ", [3, 1]),
        (UUIDS[1], [1]),
        (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
        ("GPU-bb2", [2]),
        ("1x,0", [1, 0]),  # leading digits
    ],
)
def test_valid_lists(see, text, expected):
    found = see(text)
    assert parents(found) == expected and found.problem is None


@pytest.mark.parametrize(
    ("text", "expected", "message"),
    [
        ("", [], "hides every device"),
        ("  ", [], "hides every device"),
        ("-1", [], "'-1' is neither a number nor a UUID"),
        ("none", [], "'none' is neither"),
        ("0,7,1", [0], "there is no device 7, of 4"),
        ("1,,0", [1], "'' is neither"),
        ("0,1,0", [], "twice"),
        (f"1,{UUIDS[1]}", [], "twice"),
        ("GPU-bb", [], "the beginning of 2 UUIDs"),
        (f"{UUIDS[2]},GPU-ff,0", [2], "the beginning of no UUID"),
        ("MIG-dd1", [], "no MIG device"),
    ],
)
def test_lists_that_cuda_stops_reading(see, text, expected, message):
    found = see(text)
    assert parents(found) == expected
    assert message in found.problem and found.remedy
    if expected:  # the problem names the ignored entries
        assert repr(text.split(",")[-1].strip()) in found.problem


def test_the_remedy_names_the_valid_entries(see):
    assert "0 to 3" in see("9").remedy
    assert "(0)" in see("9", A100.format(n=0)).remedy


PARTITIONED = [A100.format(n=0), MIG.format(n=1), MIG.format(n=2), A100.format(n=3)]
INSTANCES = [uuid_of(MIG.format(n=1)), uuid_of(MIG.format(n=2))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, INSTANCES[0]),  # CUDA shows one instance and no whole device
        ("0", INSTANCES[0]),
        (INSTANCES[1], INSTANCES[1]),
        ("MIG-dd2", INSTANCES[1]),
        (f"MIG-{uuid_of(PARTITIONED[0])}/2/0", INSTANCES[1]),
        ("1", uuid_of(PARTITIONED[3])),
    ],
)
def test_one_instance_of_a_partitioned_device_is_visible(see, text, expected):
    found = see(text, *PARTITIONED)
    assert [device.uuid for device in found.devices] == [expected] and found.problem is None


def test_an_instance_hides_all_other_listed_devices(see):
    found = see(f"{INSTANCES[1]},1", *PARTITIONED)
    assert [device.uuid for device in found.devices] == [INSTANCES[1]]
    assert "alone" in found.problem


def test_a_partitioned_device_without_instances_cannot_be_used(see):
    empty = [A100.format(n=0), "mig||"]
    assert see(None, *empty).devices == () and "no compute instance" in see(None, *empty).problem
    assert "no compute instance" in see("0", *empty).problem


def test_numbers_count_only_devices_that_answer(see):
    assert parents(see("1", A100.format(n=0), "lost", A100.format(n=2))) == [2]


@pytest.mark.parametrize(
    ("lines", "order", "uncertain"),
    [
        (FOUR, "FASTEST_FIRST", True),
        (FOUR, "PCI_BUS_ID", False),
        (FOUR, None, False),
        (FOUR[:2], "FASTEST_FIRST", False),
    ],
)
def test_an_order_by_speed_is_uncertain_among_different_devices(machine, lines, order, uncertain):
    machine(*lines)
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    assert visible_devices.order_is_uncertain(read_inventory(), environ) is uncertain
