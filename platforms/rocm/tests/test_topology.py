"""Reading the driver's files: devices arrive unchanged; unusable devices are named with the reason."""

from __future__ import annotations

import dataclasses
import os

import pytest
from platforms.rocm.tests.machines import GIB, HALO, MI210, MI300A, MI300X, MI355X, RX6800, uuid_of, write

from mvllm_rocm import topology
from mvllm_rocm.driver_memory import SysfsDriverMemory, driver_shares_pid_namespace
from mvllm_rocm.topology import read_inventory
from mvllm_torch_gpu.device_discovery import TopologyError


def test_devices_have_all_their_properties(machine):
    machine(dataclasses.replace(MI300X, used=5 * GIB), MI210)
    found = read_inventory()
    assert (found.driver_version, found.failures) == ("6.12.12", ())
    first, second = found.devices
    assert (first.index, first.name, first.target, first.uuid) == (0, "AMD Instinct MI300X", "gfx942", uuid_of(0))
    assert (first.memory_bytes, first.free_bytes, first.gpu_id) == (192 * GIB, 187 * GIB, 1000)
    assert (second.index, second.name, second.target, second.uuid) == (1, "AMD Instinct MI210", "gfx90a", uuid_of(1))


def test_names_come_from_the_board_then_the_list_then_the_target(machine):
    machine(MI355X, MI300X, RX6800)
    assert [device.name for device in read_inventory().devices] == [
        "AMD Instinct MI355X OAM",
        "AMD Instinct MI300X",
        "AMD gfx1030",
    ]


def test_more_than_nine_devices_keep_the_drivers_order(machine):
    machine(*[MI300X] * 11)
    assert [device.uuid for device in read_inventory().devices] == [uuid_of(n) for n in range(11)]


@pytest.mark.parametrize("device", [HALO, MI300A])
def test_a_device_that_uses_the_hosts_memory_reports_none(machine, device):
    machine(device)
    [found] = read_inventory().devices
    assert found.memory_bytes is None and found.free_bytes is None
    assert SysfsDriverMemory(found).free() is None


def test_a_partition_without_memory_files_has_unknown_free_memory(machine):
    machine(dataclasses.replace(MI300X, memory=24 * GIB, used=None))
    [found] = read_inventory().devices
    assert (found.memory_bytes, found.free_bytes) == (24 * GIB, None)


def test_a_device_without_identity_has_no_uuid(machine):
    machine(dataclasses.replace(MI300X, identity=0))
    assert read_inventory().devices[0].uuid is None


def test_the_kernels_own_driver_has_no_version(machine):
    machine(MI300X, version=None)
    assert read_inventory().driver_version is None


def test_devices_that_cannot_be_opened_are_failures(machine):
    closed, hidden = dataclasses.replace(MI300X, opens=False), dataclasses.replace(MI300X, hidden=True)
    machine(MI300X, closed, hidden, MI300X)
    found = read_inventory()
    assert [(device.index, device.uuid) for device in found.devices] == [(0, uuid_of(0)), (1, uuid_of(3))]
    assert found.failures == (
        "node 2: /dev/dri/renderD136 is not there",
        "node 3 is not readable for this process",
    )


def test_a_machine_without_the_driver_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(TopologyError, match="no driver for ROCm devices") as raised:
        read_inventory(tmp_path)
    assert "modprobe amdgpu" in raised.value.remedy and "--platform" in raised.value.remedy


def test_in_a_container_without_device_files_the_remedy_names_the_options(machine):
    machine(MI300X, kfd=False)
    with pytest.raises(TopologyError, match="/dev/kfd is not there") as raised:
        read_inventory()
    assert "--device=/dev/kfd --device=/dev/dri" in raised.value.remedy


def test_a_user_without_permission_gets_the_groups_as_remedy(machine, monkeypatch):
    root = machine(MI300X)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != root / "dev/kfd" and real(path, mode))
    with pytest.raises(TopologyError, match="may not open /dev/kfd") as raised:
        read_inventory()
    assert "groups render and video" in raised.value.remedy
    monkeypatch.setattr(os, "access", lambda path, mode: "renderD" not in str(path) and real(path, mode))
    assert read_inventory().failures == ("node 1: this user may not open /dev/dri/renderD128",)


def test_a_driver_without_devices_is_not_an_error(machine):
    machine(kfd=False)
    assert read_inventory().devices == ()


# ------------------------------------------------------------------------------------------------------------ memory


def test_free_bytes_are_current_and_exclude_other_processes(machine):
    root = machine(MI300X)
    [device] = read_inventory().devices
    write(root / "sys/class/drm/renderD128/device/mem_info_vram_used", f"{100 * GIB}\n")
    assert device.free_bytes == 192 * GIB and SysfsDriverMemory(device).free() == 92 * GIB


def test_memory_of_a_process_is_known_by_device(machine, monkeypatch):
    held = ((os.getpid(), 3 * GIB), (1, 7 * GIB))
    machine(MI210, dataclasses.replace(MI300X, held=held))
    other, device = read_inventory().devices
    monkeypatch.setattr("mvllm_rocm.driver_memory.driver_shares_pid_namespace", lambda: True)
    assert SysfsDriverMemory(device).held_by_this_process() == 3 * GIB
    assert SysfsDriverMemory(other).held_by_this_process() is None
    assert topology.bytes_of_process(device, 1) == 7 * GIB


def test_in_a_container_the_drivers_value_for_our_pid_is_ignored(machine, monkeypatch):
    machine(dataclasses.replace(MI300X, held=((os.getpid(), 3 * GIB),)))
    [device] = read_inventory().devices
    monkeypatch.setattr("mvllm_rocm.driver_memory.driver_shares_pid_namespace", lambda: False)
    assert SysfsDriverMemory(device).held_by_this_process() is None


def test_the_pid_namespace_decides_whether_the_drivers_pids_apply(tmp_path):
    assert driver_shares_pid_namespace(tmp_path) is False and driver_shares_pid_namespace(tmp_path / "absent") is False


def test_memory_of_an_unknown_device_is_unknown():
    assert SysfsDriverMemory(None).free() is None and SysfsDriverMemory(None).held_by_this_process() is None
