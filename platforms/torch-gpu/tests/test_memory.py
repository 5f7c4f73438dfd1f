"""Memory accounting: own memory, other processes' memory, the host's memory, and the out-of-memory message."""

from __future__ import annotations

import pytest
import torch

from mvllm_torch_gpu import memory
from mvllm_torch_gpu.device_module import DeviceModule
from mvllm_torch_gpu.memory import MemoryStats

GIB = 1 << 30


def stats(**changed):
    """80 GiB: others use 10, this process 1 outside torch's allocator and 20 in it, 4 of these cached."""
    facts = {
        "total": 80 * GIB,
        "driver_free": 49 * GIB,
        "allocated": 16 * GIB,
        "peak_allocated": 18 * GIB,
        "reserved": 20 * GIB,
        "outside": 1 * GIB,
    }
    return MemoryStats(**{**facts, **changed})


def test_cached_memory_counts_as_free_and_other_processes_are_separate():
    info = stats().as_info()
    assert (info.total, info.free) == (80 * GIB, (49 + 4) * GIB)
    assert (info.used_by_me, info.peak_by_me) == (17 * GIB, 19 * GIB)
    assert stats().used_by_others == 10 * GIB


def test_memory_of_a_new_process_reduces_free_and_not_own_memory():
    before, after = stats(), stats(driver_free=9 * GIB)
    assert after.as_info().free == before.as_info().free - 40 * GIB
    assert after.as_info().used_by_me == before.as_info().used_by_me
    assert after.used_by_others == before.used_by_others + 40 * GIB


def test_the_peak_is_never_below_the_used_memory():
    info = stats(peak_allocated=0).as_info()
    assert info.peak_by_me == info.used_by_me


def test_a_device_that_uses_the_hosts_memory_has_the_hosts_free_memory():
    unified = stats(driver_free=2 * GIB, host_free=30 * GIB)
    assert unified.as_info().free == 34 * GIB  # includes file caches, which the driver does not count
    assert stats(driver_free=2 * GIB, host_free=200 * GIB).as_info().free == 80 * GIB


def test_the_message_has_all_statistics_and_the_flag():
    text = memory.not_enough("A tensor of 60.00 GiB", stats(), "Lower --memory-utilization.")
    assert text == (
        "A tensor of 60.00 GiB does not fit on the device: 53.00 of 80.00 GiB are free; this process holds 17.00 GiB, "
        "other processes hold 10.00 GiB. Lower --memory-utilization."
    )


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8 << 30), (f"{6 << 30}", 5 << 30), (f"{100 << 30}", 8 << 30), (None, 8 << 30)]
)
def test_the_hosts_available_memory_respects_the_limit_of_the_control_group(tmp_path, limit, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1000 kB\nMemAvailable:    {8 << 20} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert memory.available_host_memory(meminfo, tmp_path) == expected


def test_file_caches_of_the_control_group_count_as_available(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable:    {64 << 20} kB\n")
    (tmp_path / "memory.max").write_text(f"{32 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{30 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon {12 << 30}\ninactive_file {16 << 30}\nactive_file {2 << 30}\n")
    assert memory.available_host_memory(meminfo, tmp_path) == 18 << 30


@pytest.mark.parametrize(("held", "outside"), [(70, 2), (68, 0), (3, 1), (None, 1)])
def test_driver_memory_of_another_process_with_our_pid_is_ignored(monkeypatch, held, outside):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 68 * GIB)
    driver = FreeBytes(None)
    driver.held_by_this_process = lambda: None if held is None else held * GIB
    found = memory.DeviceMemory(torch.device("cuda", 0), driver, 1 * GIB, unified=False).stats()
    assert found.outside == outside * GIB


class FreeBytes:
    """DriverMemory with a given number of free bytes."""

    def __init__(self, free):
        self.free = lambda: free

    def held_by_this_process(self):
        return None


@pytest.mark.parametrize(
    ("others_counted", "driver_free", "expected"),
    [(True, 10, 40), (False, 10, 10), (False, 60, 40), (False, None, 40)],
)
def test_the_drivers_free_memory_is_used_if_torch_ignores_other_processes(
    monkeypatch, others_counted, driver_free, expected
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    driver = FreeBytes(None if driver_free is None else driver_free * GIB)
    mine = memory.DeviceMemory(
        torch.device("cuda", 0), driver, 1 * GIB, unified=False, others_counted=others_counted
    ).stats()
    assert mine.as_info().free == expected * GIB
    assert mine.outside == 1 * GIB and mine.used_by_others == (80 - expected - 1) * GIB


def test_freed_host_buffers_can_be_returned_where_no_device_is() -> None:
    DeviceModule().empty_host_cache()
