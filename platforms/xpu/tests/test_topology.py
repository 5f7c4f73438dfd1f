"""Reading the kernel's files: devices arrive unchanged; unusable devices are named with the reason."""

from __future__ import annotations

import dataclasses
import os

import pytest
from platforms.xpu.tests.machines import (
    A770,
    B60,
    B580,
    GIB,
    IRIS_MAX,
    LUNAR_LAKE,
    MAX_1550,
    NETWORK,
    NEWER,
    OLDER,
    OTHER_MAKER,
    UHD_770,
    address_of,
    write,
)

from mvllm_torch_gpu.device_discovery import TopologyError
from mvllm_xpu import chips, topology
from mvllm_xpu.driver_memory import FdinfoDriverMemory
from mvllm_xpu.topology import read_inventory


def test_devices_have_all_their_properties(machine):
    machine(B60, MAX_1550)
    found = read_inventory()
    assert found.failures == ()
    card, large = found.devices
    assert (card.index, card.address, card.name, card.driver) == (0, address_of(0), "Arc Pro B60", "xe")
    assert (card.tiles, card.memory_bytes, card.integrated) == (1, 24 * GIB, False)
    assert (large.name, large.tiles, large.memory_bytes) == ("Data Center GPU Max 1550", 2, 128 * GIB)


def test_the_older_driver_has_no_tiles_and_may_report_the_cards_memory(machine):
    root = machine(A770, dataclasses.replace(MAX_1550, driver="i915", tiles=0))
    write(root / f"sys/bus/pci/devices/{address_of(0)}/drm/card0/lmem_total_bytes", f"{16 * GIB}\n")
    arc, large = read_inventory().devices
    assert (arc.tiles, arc.memory_bytes) == (1, 16 * GIB)
    assert (large.tiles, large.memory_bytes) == (2, None), "of the chip two are known"


def test_cards_are_counted_first_unless_bus_order_is_set(machine, monkeypatch):
    machine(UHD_770, B580, B580)
    assert [device.address for device in read_inventory().devices] == [address_of(1), address_of(2), "0000:00:02.0"]
    monkeypatch.setenv("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1")
    assert [device.address for device in read_inventory().devices] == ["0000:00:02.0", address_of(1), address_of(2)]
    assert [device.index for device in read_inventory().devices] == [0, 1, 2]


def test_devices_of_other_vendors_and_classes_are_ignored(machine):
    machine(OTHER_MAKER, NETWORK, B580)
    found = read_inventory()
    assert [device.name for device in found.devices] == ["Arc B580"] and found.failures == ()


def test_unlisted_newer_chips_are_supported_and_old_ones_are_not(machine):
    machine(
        dataclasses.replace(NEWER, address="0000:00:02.0"), NEWER, dataclasses.replace(OLDER, address="0000:00:03.0")
    )
    found = read_inventory()
    assert [(device.name, device.integrated, device.chip.supported) for device in found.devices] == [
        ("Intel GPU [f123]", False, True),
        ("Intel GPU [f123]", True, True),
    ]
    assert found.failures == ("0000:00:03.0: Intel GPU [3e92] is older than what Level Zero knows",)


@pytest.mark.parametrize(
    ("chip", "integrated", "supported"),
    [(0x56C0, False, True), (0xE223, False, True), (0xB0A0, True, True), (0x7D55, True, True), (0x9A49, True, False)],
)
def test_families_are_found_by_ranges_of_ids(chip, integrated, supported):
    found = chips.of_id(chip)
    assert (found.integrated, found.supported) == (integrated, supported)


def test_chips_of_other_ranges_are_unknown():
    assert chips.of_id(0x3E92) is None and chips.of_id(0) is None


# ------------------------------------------------------------------------------------------------- unusable devices


@pytest.mark.parametrize(
    ("device", "message", "remedy"),
    [
        (dataclasses.replace(B580, driver=None), "Arc B580 is with no driver", "modprobe xe"),
        (dataclasses.replace(B580, driver="vfio-pci"), "is with the driver vfio-pci", "modprobe xe"),
        (dataclasses.replace(UHD_770, renders=False), "shows pictures alone", "nomodeset"),
        (dataclasses.replace(B580, opens=False), "/dev/dri/renderD128 is not there", "--device=/dev/dri"),
        (OLDER, "is older than what Level Zero knows", "Arc or Data Center GPU"),
    ],
)
def test_each_problem_has_a_reason_and_a_remedy(machine, device, message, remedy):
    machine(device)
    with pytest.raises(TopologyError, match=message) as raised:
        read_inventory()
    assert remedy in raised.value.remedy


def test_a_user_without_permission_gets_the_group_as_remedy(machine, monkeypatch):
    machine(B580)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "renderD" not in str(path) and real(path, mode))
    with pytest.raises(TopologyError, match="this user may not open /dev/dri/renderD128") as raised:
        read_inventory()
    assert "group render" in raised.value.remedy and "--group-add" in raised.value.remedy


def test_a_machine_without_a_device_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(TopologyError, match="the PCI bus has no Intel GPU") as raised:
        read_inventory(tmp_path)
    assert "--platform" in raised.value.remedy and "virtual machine" in raised.value.remedy


def test_unusable_devices_do_not_hide_the_others(machine):
    machine(B580, dataclasses.replace(B580, opens=False), IRIS_MAX)
    found = read_inventory()
    assert [(device.index, device.address) for device in found.devices] == [(0, address_of(0)), (1, address_of(2))]
    assert found.failures == (f"{address_of(1)}: Arc B580: /dev/dri/renderD129 is not there",)


# ---------------------------------------------------------------------------------------------------------- memory

ACCOUNT = """pos:\t0
drm-driver:\txe
drm-client-id:\t{client}
drm-pdev:\t{address}
drm-total-vram0:\t99 MiB
drm-resident-vram0:\t{size}
drm-resident-gtt:\t5 MiB
"""


def account(folder, **files):
    for name, (address, client, size) in files.items():
        write(folder / name, ACCOUNT.format(address=address, client=client, size=size))
    return folder


def test_memory_of_a_process_is_known_by_card_and_each_client_counts_once(tmp_path):
    other = address_of(1)
    folder = account(
        tmp_path / "fdinfo",
        a=(address_of(0), 4, "51200 KiB"),
        b=(address_of(0), 4, "51200 KiB"),
        c=(address_of(0), 5, "2 MiB"),
        d=(other, 6, "7"),
    )
    write(folder / "e", "pos:\t0\nflags:\t02\n")
    assert topology.held_by_process(address_of(0), folder) == 52 << 20
    assert topology.held_by_process(other, folder) == 7
    assert topology.held_by_process("0000:99:00.0", folder) is None


def test_without_statistics_the_memory_of_a_process_is_unknown(tmp_path, machine):
    machine(LUNAR_LAKE)
    [device] = read_inventory().devices
    assert device.integrated and device.memory_bytes is None
    assert topology.held_by_process(device.address, tmp_path / "nothing") is None
    for driver in (FdinfoDriverMemory(None), FdinfoDriverMemory(device)):
        assert driver.free() is None and driver.held_by_this_process() is None
