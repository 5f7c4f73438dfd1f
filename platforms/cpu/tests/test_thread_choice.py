"""The number of compute threads, by affinity, physical cores, CPU quotas and OMP_NUM_THREADS, and its logged reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mvllm.plugin_api import WorkerContext
from mvllm_cpu import doctor, host_resources
from mvllm_cpu.runtime import CPURuntime

Write = Callable[[str, str], None]
CGROUP = Path("/sys/fs/cgroup")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into a fake /proc and /sys of a machine with 8 CPUs; {root} in a text is their parent folder."""
    monkeypatch.setattr(host_resources, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_resources, "SYS", tmp_path / "sys")
    monkeypatch.setattr(host_resources, "allowed_cpus", lambda: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{root}", str(tmp_path)))

    return write


V2 = "25 1 0:22 / {root}/sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "30 1 0:26 /docker/abc {root}/sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
QUOTAS: dict[str, tuple[dict[str, str], float | None, int]] = {
    "tightest of nested groups is above": (
        {"pods": "max 100000", "pods/one": "150000 100000", "pods/one/job": "400000 100000"}, 1.5, 2
    ),
    "tightest of nested groups is innermost": ({"pods": "600000 100000", "pods/one/job": "125000 100000"}, 1.25, 1),
    "at the top, as a container sees its own": ({"": "250000 50000"}, 5.0, 5),
    "less than one": ({"pods/one/job": "20000 100000"}, 0.2, 1),
    "more than the machine": ({"pods": "6400000 100000"}, 64.0, 8),
    "none": ({"pods": "max 100000"}, None, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
@pytest.mark.parametrize("version", [1, 2])
def test_tightest_quota_bounds_the_threads(machine, case, version):
    groups, quota, threads = QUOTAS[case]
    machine("proc/self/mountinfo", V2 if version == 2 else V1)
    machine("proc/self/cgroup", "0::/pods/one/job\n" if version == 2 else "4:cpu,cpuacct:/docker/abc/pods/one/job\n")
    for group, limit in groups.items():
        if version == 2:
            machine(f"sys/fs/cgroup/{group}/cpu.max", limit)
        else:
            words = limit.replace("max", "-1").split()
            machine(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us", words[0])
            machine(f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us", words[1])
    assert (host_resources.cpu_quota(), host_resources.usable_threads()) == (quota, threads)


def test_a_control_group_outside_of_the_mount_uses_the_mounted_root(machine):
    machine("proc/self/mountinfo", V2 + V1)
    machine("proc/self/cgroup", "4:cpu,cpuacct:/docker/other\n0::/../elsewhere\n")
    machine("sys/fs/cgroup/cpu.max", "300000 100000")
    machine("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000")
    machine("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert host_resources.cpu_quota() == 2.0


@pytest.mark.parametrize("source", ["thread_siblings_list", "core_cpus_list", "core_id"])
@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [(range(8), [0, 1, 2, 3]), (range(4), [0, 1, 2, 3]), (range(4, 8), [4, 5, 6, 7]), ([0, 4, 1], [0, 1]), ([6], [6])],
)
def test_one_thread_per_physical_core_of_the_affinity_mask(machine, monkeypatch, source, allowed, chosen):
    monkeypatch.setattr(host_resources, "allowed_cpus", lambda: list(allowed))
    for cpu in range(8):  # two packages; siblings are 0 and 4, 1 and 5, ...
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        if source == "core_id":
            machine(f"{folder}/core_id", str(cpu % 2))
            machine(f"{folder}/physical_package_id", str(cpu % 4 // 2))
        else:
            machine(f"{folder}/{source}", f"{cpu % 4},{cpu % 4 + 4}")
    assert [core.cpu for core in host_resources.physical_cores()] == chosen
    assert host_resources.usable_threads() == len(chosen)


def test_the_reason_names_the_limits(machine, monkeypatch):
    describe = host_resources.describe_threads
    assert describe(8) == "8 of 8 CPUs"
    assert describe(2, workers=4) == "2 of 8 CPUs: 4 workers share them"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert describe(host_resources.usable_threads()) == "3 of 8 CPUs: OMP_NUM_THREADS=3"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as the platform sets it for its workers
    assert describe(8) == "8 of 8 CPUs"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert describe(1) == "1 of 8 CPUs: set in this process before the engine"
    monkeypatch.setattr(host_resources, "allowed_cpus", lambda: [0, 1, 4, 5])
    for cpu in range(8):
        machine(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    assert describe(2) == "2 of 8 CPUs: the process may run on 4, one per physical core"
    machine("proc/self/cgroup", "0::/job\n")
    machine("sys/fs/cgroup/job/cpu.max", "90000 100000")
    assert describe(1).endswith("one per physical core, cgroup quota 0.9")
    machine("sys/fs/cgroup/job/cpu.max", "150000 100000")
    assert describe(2).endswith("one per physical core, cgroup quota 1.5")


def test_choice_is_logged_at_the_start_and_shown_by_doctor(machine, monkeypatch, caplog):
    machine("proc/self/cgroup", "0::/job\n")
    machine("sys/fs/cgroup/job/cpu.max", "100000 100000")
    threads = torch.get_num_threads()
    try:
        with caplog.at_level("INFO"):
            CPURuntime(WorkerContext(in_engine_process=True))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    found = [text for text in caplog.messages if "1 of 8 CPUs: cgroup quota 1" in text]
    assert len(found) == 1
    shown = next(check for check in doctor.checks() if check.id == "platform.cpu.threads")
    assert "1 of 8 CPUs: cgroup quota 1" in shown.found


# Computes for a second; prints the number of threads and the CPU time per second.
PROGRAM = """
import ctypes, sys, time, torch
from mvllm.plugin_api import WorkerContext
from mvllm_cpu import kernels
from mvllm_cpu.platform import make_platform
sys.stdin.readline()
make_platform().init_device(WorkerContext(in_engine_process=True))
library = kernels.load().library
x, out = torch.ones(512, 2048), torch.empty(512, 1024)
pointer, number = ctypes.c_void_p, ctypes.c_int64
begin, used = time.monotonic(), time.process_time()
while time.monotonic() - begin < 1 and library is not None:
    library.mvllm_cpu_silu_and_mul(
        pointer(x.data_ptr()), number(2048), pointer(out.data_ptr()), number(512), number(1024), 0
    )
print(torch.get_num_threads(), (time.process_time() - used) / (time.monotonic() - begin))
"""


def in_process(prepare: Callable[[int], None]) -> tuple[int, float]:
    """Runs PROGRAM after `prepare(pid)`; returns its number of threads and the average number of used cores."""
    env = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        prepare(process.pid)
        output, _ = process.communicate("go\n", timeout=120)
    finally:
        process.kill()
        process.wait()
    threads, used = output.split()
    return int(threads), float(used)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
@pytest.mark.skipif(sys.platform != "linux", reason="torch loads its OpenMP runtime for the whole process on Linux")
def test_other_threads_compute_with_the_number_of_threads_of_the_first():
    before = torch.get_num_threads()
    openmp = ctypes.CDLL(None)  # where the kernels find it, too
    runtime = CPURuntime(WorkerContext(in_engine_process=True))
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(runtime.bind_thread).result()
            assert thread.submit(openmp.omp_get_max_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_process_that_is_pinned_to_one_cpu_computes_with_one_thread():
    cpu = min(os.sched_getaffinity(0))
    threads, used = in_process(lambda pid: os.sched_setaffinity(pid, {cpu}))
    assert threads == 1 and used < 1.1


@pytest.fixture
def group_of_one_cpu() -> Iterator[Path]:
    """A new control group without a quota; its parent, also new, has a quota of one CPU."""
    above = None
    for folder in host_resources._cgroup_folders("cpu"):
        version_1, version_2 = folder / "cpu.cfs_quota_us", folder / "cgroup.controllers"
        if not (version_1.exists() or (version_2.exists() and "cpu" in version_2.read_text().split())):
            continue
        above = folder / f"mvllm-test-{os.getpid()}-{time.monotonic_ns()}"
        try:
            above.mkdir()
            break
        except OSError:
            above = None
    if above is None:
        pytest.skip("this machine lets nobody make control groups")
    inner = above / "job"
    try:
        try:
            if (above / "cpu.cfs_quota_us").exists():
                (above / "cpu.cfs_quota_us").write_text("100000")
            else:
                (above / "cgroup.subtree_control").write_text("+cpu")
                (above / "cpu.max").write_text("100000 100000")
            inner.mkdir()
        except OSError as e:
            pytest.skip(f"this machine lets nobody limit control groups: {e}")
        yield inner
    finally:
        for folder in (inner, above):
            if folder.exists():
                folder.rmdir()


def test_process_with_a_quota_of_one_cpu_computes_with_one_thread(group_of_one_cpu):
    def join(pid: int) -> None:
        (group_of_one_cpu / "cgroup.procs").write_text(str(pid))

    threads, used = in_process(join)
    assert threads == 1 and used < 1.1
