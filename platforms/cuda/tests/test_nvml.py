"""Reading NVML: devices and memory arrive unchanged, and errors carry a remedy."""

from __future__ import annotations

import os

import pytest
from platforms.cuda.tests.fake_nvml import A100, GIB, MIG, SPARK, T4

from mvllm_cuda import nvml
from mvllm_cuda.nvml import NvmlError, opened, read_inventory


def test_devices_have_all_their_properties(machine):
    machine("driver|570.133.20|12080", A100.format(n=0), T4.format(n=1))
    found = read_inventory()
    assert (found.driver_version, found.cuda_version, found.failures) == ("570.133.20", (12, 8), ())
    first, second = found.devices
    assert (first.index, first.name, first.compute_capability) == (0, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert (first.memory_bytes, first.free_bytes) == (80 * GIB, 85000000000)
    assert first.uuid == "GPU-aa000000-0000-0000-0000-000000000000"
    assert (second.index, second.name, second.compute_capability) == (1, "Tesla T4", (7, 5))
    assert not first.mig_enabled and not second.mig_enabled  # T4s do not support MIG and return an error


def test_the_library_is_found_in_the_folder_of_a_containers_mount(machine, monkeypatch, tmp_path):
    machine(A100.format(n=0))
    monkeypatch.setattr(nvml, "FOLDERS", (str(tmp_path / "not-there"), os.path.dirname(nvml.LIBRARY)))
    monkeypatch.setattr(nvml, "LIBRARY", os.path.basename(nvml.LIBRARY))
    assert len(read_inventory().devices) == 1


def test_a_device_that_uses_the_hosts_memory_reports_none(machine):
    machine(SPARK.format(n=0))
    [device] = read_inventory().devices
    assert device.memory_bytes is None and device.free_bytes is None


def test_compute_instances_are_found_despite_unused_indices(machine):
    machine(A100.format(n=0), MIG.format(n=1), "mig||", MIG.format(n=2))
    [device] = read_inventory().devices
    assert device.mig_enabled
    assert [mig.uuid[:6] for mig in device.mig_devices] == ["MIG-dd", "MIG-dd"]
    assert device.mig_devices[1].memory_bytes == 10 * GIB
    assert device.mig_devices[1].old_id == f"MIG-{device.uuid}/2/0"


def test_a_lost_device_does_not_hide_the_others(machine):
    machine(A100.format(n=0), "lost", A100.format(n=2))
    found = read_inventory()
    assert [device.index for device in found.devices] == [0, 2]
    assert "device 1" in found.failures[0] and "GPU is lost" in found.failures[0]


def test_memory_of_a_process(machine):
    machine(A100.format(n=0), f"process|{os.getpid()}|1000", "process|1|77", f"process|{os.getpid()}|24")
    with opened() as library:
        uuid = library.inventory().devices[0].uuid
        assert library.bytes_of_process(uuid, os.getpid()) == 1024
        assert library.bytes_of_process(uuid, 999_999_999) is None
        assert library.memory(uuid) == (80 * GIB, 85000000000)


@pytest.mark.parametrize(
    ("code", "message", "remedy"), [(9, "Driver Not Loaded", "modprobe"), (18, "mismatch", "Restart the machine")]
)
def test_errors_of_the_driver_have_a_reason_and_a_remedy(machine, code, message, remedy):
    machine(f"init|{code}")
    with pytest.raises(NvmlError, match=message) as raised:
        read_inventory()
    assert remedy in raised.value.remedy


def test_a_missing_library_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-not-installed.so.1")
    with pytest.raises(NvmlError, match="libnvidia-ml-not-installed") as raised:
        read_inventory()
    assert raised.value.code is None and "Install" in raised.value.remedy


def test_the_library_is_closed_after_each_read(machine):
    machine(A100.format(n=0))
    with opened() as library:
        library.inventory()
    with pytest.raises(NvmlError, match="Uninitialized"):
        library.inventory()
