"""Device memory from NVML; it is unknown if NVML does not report it."""

from __future__ import annotations

import os

import pytest
from platforms.cuda.tests.fake_nvml import A100, GIB, SPARK, uuid_of

from mvllm_cuda.driver_memory import NvmlDriverMemory

UUID = uuid_of(A100.format(n=0))


def test_memory_of_this_process_comes_from_nvml(machine):
    machine(A100.format(n=0), f"process|{os.getpid()}|{3 * GIB}", f"process|1|{5 * GIB}")
    assert NvmlDriverMemory(UUID).held_by_this_process() == 3 * GIB
    assert NvmlDriverMemory(UUID).free() == 85000000000


@pytest.mark.parametrize("uuid", [None, "GPU-unknown"])
def test_memory_that_nvml_does_not_report_is_unknown(machine, uuid):
    machine(A100.format(n=0), "process|1|77")
    assert NvmlDriverMemory(uuid).held_by_this_process() is None and NvmlDriverMemory(uuid).free() is None
    assert NvmlDriverMemory(UUID).held_by_this_process() is None  # NVML does not list processes of containers


def test_a_device_without_memory_of_its_own_has_no_free_bytes(machine):
    machine(SPARK.format(n=0))
    assert NvmlDriverMemory(uuid_of(SPARK.format(n=0))).free() is None
