"""The workspace reuses memory of freed tensors and never gives the same memory to two live tensors."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mvllm_cpu import memory, recording, workspace
from mvllm_cpu.workspace import PAGE, SMALLEST, Workspace

MIB = 1 << 20


def test_memory_is_reused_when_its_tensor_is_freed():
    space = Workspace()
    first = space.empty((3, MIB), torch.uint8)
    second = space.empty((MIB,), torch.float32)
    at = first.data_ptr()
    view = first[1:].view(torch.int16)
    del first
    assert space.empty((MIB,), torch.uint8).data_ptr() != at  # a view is alive
    del view
    third = space.empty((2, MIB), torch.uint8)
    assert third.data_ptr() == at and third.is_contiguous() and third.shape == (2, MIB)
    assert space.bytes_in_use() == second.nbytes + third.nbytes
    del second, third
    assert space.bytes_in_use() == 0


def test_adjacent_free_ranges_are_merged():
    space = Workspace()
    parts = [space.empty((8 * MIB,), torch.uint8) for _ in range(8)]
    at, reserved = parts[0].data_ptr(), space.bytes_reserved()
    for i in (1, 0, 3, 2, 7, 5, 6, 4):
        parts[i] = None
    whole = space.empty((64 * MIB,), torch.uint8)
    assert (whole.data_ptr(), space.bytes_reserved()) == (at, reserved)


def test_a_tensor_larger_than_every_hole_gets_a_new_region():
    space = Workspace()
    tensors = [space.empty((size,), torch.uint8) for size in (40 * MIB, 40 * MIB, 300 * MIB)]
    for i, tensor in enumerate(tensors):
        tensor[:: 1 << 20] = i
    assert [int(tensor[-(1 << 20)]) for tensor in tensors] == [0, 1, 2]
    assert space.bytes_in_use() == 380 * MIB


def test_live_tensors_never_overlap():
    space, rng, alive = Workspace(), random.Random(5), {}

    def check():
        spans = sorted((t.data_ptr(), t.data_ptr() + max(1, t.nbytes)) for t in alive.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert space.bytes_in_use() == sum(-(-t.nbytes // PAGE) * PAGE for t in alive.values())

    for step in range(400):
        if alive and rng.random() < 0.5:
            del alive[rng.choice(list(alive))]
        else:
            alive[step] = space.empty((rng.randint(1, 3 * MIB),), torch.float32)
        check()
    assert all(t.data_ptr() % 64 == 0 for t in alive.values())
    alive.clear()
    assert space.bytes_in_use() == 0


def test_threads_share_a_workspace():
    space = Workspace()

    def work(number: int) -> bool:
        for _ in range(100):
            tensor = space.empty((MIB // 4,), torch.int32)
            tensor[::1024] = number
            if not bool((tensor[::1024] == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert space.bytes_in_use() == 0


def test_free_memory_is_returned_to_the_system():
    space = Workspace()
    kept, freed = space.empty((MIB,), torch.uint8), space.empty((8 * MIB,), torch.uint8)
    kept.fill_(7)
    freed.fill_(9)
    del freed
    space.release()
    assert bool((kept == 7).all())
    assert not bool(space.empty((8 * MIB,), torch.uint8).any()), "fresh pages are zero"


def test_small_and_recorded_tensors_are_allocated_by_torch():
    before = workspace.process_workspace.bytes_in_use()
    small = workspace.empty((SMALLEST - 1,), torch.uint8)
    recorded, *_ = recording.record(lambda: workspace.empty((SMALLEST,), torch.uint8))
    assert workspace.process_workspace.bytes_in_use() == before
    large = workspace.empty((SMALLEST,), torch.uint8)
    assert workspace.process_workspace.bytes_in_use() - before == SMALLEST
    assert small.nbytes < recorded.nbytes == large.nbytes


def test_an_exhausted_address_space_is_a_memory_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="cannot be mapped"):
        Workspace().empty((MIB,), torch.uint8)


def test_a_cycle_that_is_collected_within_a_call_frees_its_memory():
    space = Workspace()
    cycle: list = [space.empty((MIB,), torch.uint8)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert space.bytes_in_use() == 0


def test_a_region_of_the_needed_size_is_enough():
    code = """
import resource
from pathlib import Path
import torch
from mvllm_cpu.workspace import PAGE, Workspace
taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
resource.setrlimit(resource.RLIMIT_AS, (taken + (600 << 20),) * 2)
space = Workspace()
tensor = space.empty((300 << 20,), torch.uint8)
tensor[-1] = 7
assert space.bytes_in_use() == tensor.nbytes and int(tensor[-1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
