"""The CPU platform's contract methods: probe, plan, topology, device, fallback without kernels, doctor."""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from platforms.cpu.tests.dense_attention import make_case, run

from mvllm.plugin_api import (
    CacheConfig,
    CheckStatus,
    ParallelConfig,
    Plan,
    PlatformError,
    ReferenceAttention,
    WorkerContext,
)
from mvllm.testing.attention_cases import make_spec
from mvllm_cpu import host_resources, kernels
from mvllm_cpu.platform import CAPABILITIES, make_platform
from mvllm_cpu.plugin import SPEC


@pytest.fixture
def platform():
    return make_platform()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine_config(**changes):
    config = SimpleNamespace(
        model=SimpleNamespace(dtype="auto"), cache=CacheConfig(), parallel=ParallelConfig(), batch_invariant=False
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestDiscovery:
    def test_hook_and_probe_import_no_torch_and_take_less_than_a_second_of_the_processor(self):
        code = (
            "import sys, mvllm_cpu.plugin as p; p.mvllm_platform()\n"
            "import time, mvllm_cpu.probe; t = time.process_time(); r = mvllm_cpu.probe.probe()\n"
            "print(r.available, time.process_time() - t < 1, 'torch' in sys.modules)"
        )
        assert python(code) == "True True False"

    def test_plan_and_topology_need_no_torch(self):
        code = (
            "import sys; from mvllm_cpu.platform import make_platform; from mvllm.plugin_api import ParallelConfig\n"
            "p = make_platform(); p.topology(ParallelConfig()); p.capabilities; print('torch' in sys.modules)"
        )
        assert python(code) == "False"

    def test_missing_torch_is_a_reason_with_a_remedy(self):
        code = (
            "import importlib.util as u; u.find_spec = lambda name: None\n"
            "from mvllm_cpu.probe import probe; r = probe(); print(r.available, 'torch' in r.reason, bool(r.remedy))"
        )
        assert python(code) == "False True True"

    def test_spec_matches_the_entry_point(self, platform):
        assert platform.spec is SPEC and SPEC.name == "cpu"
        assert platform.capabilities == CAPABILITIES == make_platform().capabilities


class TestPlan:
    def test_default_memory_utilization_is_lowered_with_a_reason(self, platform):
        plan = platform.plan(engine_config())
        assert isinstance(plan, Plan)
        (change,) = plan.changes
        assert change.field == "cache.memory_utilization" and change.value == 0.5 and "host" in change.reason

    def test_memory_utilization_of_the_user_is_kept(self, platform):
        cache = dataclasses.replace(CacheConfig(), memory_utilization=0.8)
        assert platform.plan(engine_config(cache=cache)) == Plan()

    def test_plan_is_pure(self, platform):
        assert platform.plan(engine_config()) == platform.plan(engine_config())


class TestTopology:
    def test_one_worker_may_live_in_the_engine(self, platform):
        topology = platform.topology(ParallelConfig())
        assert topology.num_workers == 1 and topology.executors[0] == "uni"
        assert topology == platform.topology(ParallelConfig())

    def test_several_workers_share_the_cores(self, platform, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(
            host_resources, "physical_cores", lambda: [host_resources.Core(i, i // 4) for i in range(8)]
        )
        monkeypatch.setattr(host_resources, "cpu_quota", lambda: None)
        topology = platform.topology(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
        assert topology.num_workers == 4 and "uni" not in topology.executors
        assert [env["OMP_NUM_THREADS"] for env in topology.env_per_worker] == ["2"] * 4
        assert [host_resources.core_share(r, 4).cpus for r in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]

    def test_more_workers_than_cores_get_one_thread_each(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(
            host_resources, "physical_cores", lambda: [host_resources.Core(0, 0), host_resources.Core(1, 0)]
        )
        assert [host_resources.core_share(r, 3).threads for r in range(3)] == [1, 1, 1]


class TestMachine:
    @pytest.fixture
    def fake(self, tmp_path, monkeypatch):
        """An empty /proc and /sys to put files into."""
        monkeypatch.setattr(host_resources, "PROC", tmp_path / "proc")
        monkeypatch.setattr(host_resources, "SYS", tmp_path / "sys")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

        def write(path: str, text: str) -> None:
            file: Path = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

        return write

    def test_second_hardware_threads_are_not_counted(self, fake, monkeypatch):
        monkeypatch.setattr(host_resources, "allowed_cpus", lambda: [0, 1, 2, 3])
        for cpu in range(4):
            fake(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
        assert [core.cpu for core in host_resources.physical_cores()] == [0, 1]

    def test_cores_are_ordered_by_node(self, fake, monkeypatch):
        monkeypatch.setattr(host_resources, "allowed_cpus", lambda: [0, 1, 2, 3])
        for cpu in range(4):
            fake(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu))
            fake(f"sys/devices/system/cpu/cpu{cpu}/node{cpu % 2}/cpulist", "")
        assert [(core.cpu, core.node) for core in host_resources.physical_cores()] == [(0, 0), (2, 0), (1, 1), (3, 1)]

    def test_quota_of_the_control_group_bounds_the_threads(self, fake, monkeypatch):
        monkeypatch.setattr(host_resources, "allowed_cpus", lambda: list(range(8)))
        fake("proc/self/cgroup", "0::/job\n")
        fake("sys/fs/cgroup/job/cpu.max", "250000 100000\n")
        assert host_resources.cpu_quota() == 2.5 and host_resources.usable_threads() == 3

    def test_cores_of_several_processes_are_counted_once_and_within_the_quota(self, fake, monkeypatch):
        bound = {1: [0], 2: [1], 3: [1, 2, 3]}

        def allowed_cpus(pid: int = 0) -> list[int]:
            if pid not in bound:
                raise ProcessLookupError(pid)
            return bound[pid]

        monkeypatch.setattr(host_resources, "allowed_cpus", allowed_cpus)
        for cpu in range(4):  # 2 and 3 are one core
            fake(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{min(cpu, 2)}\n")
        assert [host_resources.num_cores_of_processes(pids) for pids in ([1], [1, 2], [2, 2], [1, 2, 3], [1, 99])] == [
            1,
            2,
            1,
            3,
            1,
        ]
        monkeypatch.setattr(host_resources, "cpu_quota", lambda: 1.5)
        assert host_resources.num_cores_of_processes([1, 2, 3]) == 1

    def test_thread_count_of_the_user_has_precedence(self, fake, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
        assert host_resources.usable_threads() == 5

    def test_memory_is_limited_by_the_control_group(self, fake):
        fake("proc/meminfo", "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\n")
        assert (host_resources.memory_total(), host_resources.memory_free()) == (8_192_000_000, 6_144_000_000)
        fake("proc/self/cgroup", "0::/job\n")
        fake("sys/fs/cgroup/job/memory.max", "1000000000\n")
        fake("sys/fs/cgroup/job/memory.current", "700000000\n")
        fake("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 200000000\n")
        assert (host_resources.memory_total(), host_resources.memory_free()) == (1_000_000_000, 500_000_000)


class TestDevice:
    def test_memory_statistics_are_consistent_and_follow_allocations(self, platform, threads):
        runtime = platform.init_device(WorkerContext())
        runtime.reset_peak_memory()
        before = runtime.memory()
        # A new mapping, because memory that earlier tests freed may still belong to the process.
        held = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8).fill_(1)
        during = runtime.memory()
        assert 0 < before.used_by_me < before.total and before.free < before.total
        assert during.used_by_me - before.used_by_me > 60 << 20
        del held
        assert runtime.memory().peak_by_me >= during.used_by_me - (4 << 20)

    def test_values_survive_both_copies(self, platform, threads):
        runtime = platform.init_device(WorkerContext())
        host = torch.arange(10)
        assert torch.equal(runtime.to_host(runtime.to_device(host)).wait(), torch.arange(10))

    def test_equal_seeds_give_equal_numbers(self, platform, threads):
        found = []
        for _ in range(2):
            platform.init_device(WorkerContext(seed=7))
            found.append(torch.rand(4))
        assert torch.equal(*found)

    def test_worker_in_the_callers_process_is_not_bound_and_gets_no_more_threads(self, platform, threads, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        cpus = os.sched_getaffinity(0)
        torch.set_num_threads(1)
        platform.init_device(WorkerContext(in_engine_process=True))
        assert torch.get_num_threads() == 1 and os.sched_getaffinity(0) == cpus

    def test_worker_with_its_own_process_is_bound_to_its_cores(self):
        code = (
            "import os, torch; from mvllm.plugin_api import WorkerContext\n"
            "from mvllm_cpu import host_resources; from mvllm_cpu.platform import make_platform\n"
            "share = host_resources.core_share(1, 2)\n"
            "make_platform().init_device(WorkerContext(1, 1, 2, 2, in_engine_process=False))\n"
            "print(os.sched_getaffinity(0) == set(share.cpus), torch.get_num_threads() == share.threads)"
        )
        assert python(code) == "True True"


class TestKernels:
    @pytest.mark.skipif(os.environ.get("MVLLM_CPU_KERNELS") == "0", reason="MVLLM_CPU_KERNELS=0 asks for none")
    @pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler to build them with")
    def test_kernels_exist_if_there_is_a_compiler(self):
        """Kernel tests are skipped without kernels; this test fails if they are missing."""
        loaded = kernels.load()
        assert loaded.library is not None, loaded.reason

    def test_attention_falls_back_to_the_reference_without_kernels(self, platform, monkeypatch):
        case = make_case(make_spec(dtype="bfloat16"), [(30, 1), (0, 40)])
        fast = run(platform.attention_backend(case.spec), case, poison=False)
        monkeypatch.setenv("MVLLM_CPU_KERNELS", "0")
        backend = platform.attention_backend(case.spec)
        assert isinstance(backend, ReferenceAttention)
        assert (run(backend, case, poison=False) - fast).abs().max() < 0.02
        assert not [provider for provider in platform.ops() if provider.name == "mvllm_cpu"]

    def test_doctor_reports_missing_kernels_with_the_reason(self, platform, monkeypatch):
        monkeypatch.setenv("MVLLM_CPU_KERNELS", "0")
        found = {check.id: check for check in platform.doctor()}
        assert list(found) == [
            "platform.cpu.kernels",
            "platform.cpu.threads",
            "platform.cpu.memory",
            "platform.cpu.torch_build",
        ]
        assert found["platform.cpu.kernels"].status is CheckStatus.WARNING
        assert "MVLLM_CPU_KERNELS" in found["platform.cpu.kernels"].found and found["platform.cpu.kernels"].remedy

    def test_impossible_specs_are_refused_with_the_reason(self, platform):
        with pytest.raises(PlatformError, match=r": 5 query heads do not divide among 2 [^;]*$"):
            platform.attention_backend(make_spec(5, 2))
        with pytest.raises(PlatformError, match="KV cache dtype int3"):
            platform.attention_backend(make_spec(kv_dtype="int3"))

    @pytest.mark.skipif(kernels.load().library is None, reason="no kernels")
    def test_doctor_reports_an_unavailable_requested_instruction_set(self, platform, monkeypatch):
        monkeypatch.setenv("MVLLM_CPU_ISA", "avx1024")
        check = platform.doctor()[0]
        assert check.status is CheckStatus.WARNING and "avx1024" in check.found and "avx2" in check.remedy

    @pytest.mark.skipif(kernels.load().library is None, reason="no kernels")
    def test_one_openmp_runtime_in_the_process(self):
        code = (
            "from mvllm_cpu import kernels; kernels.load().library.mvllm_cpu_isa()\n"
            "import re; maps = open('/proc/self/maps').read()\n"
            "print(len({l.split()[-1] for l in maps.splitlines() if re.search('lib(gomp|omp|iomp)', l)}))"
        )
        assert python(code) == "1"
