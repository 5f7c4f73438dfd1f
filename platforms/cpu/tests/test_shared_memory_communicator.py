"""Shared-memory collectives: results as with sockets, bit-identical on all ranks, and errors for dead ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from mvllm.plugin_api import GroupSpec, PlatformError
from mvllm_cpu import host_resources, kernels
from mvllm_cpu import shared_memory_communicator as module
from mvllm_cpu.linear import Linear
from mvllm_cpu.ops import KernelOps
from mvllm_cpu.replay import Replay
from mvllm_cpu.shared_memory_communicator import SharedMemoryCommunicator
from tests.helpers.forked_ranks import start_ranks
from tests.helpers.ports import free_port

pytestmark = pytest.mark.skipif(
    not hasattr(kernels.load().library, "mvllm_cpu_shared_exchange"), reason="the kernels are not built for this system"
)
HOST = torch.device("cpu")
WIDTH = 64


def spawn(body: Callable[..., None], world_size: int) -> None:
    start_ranks(body, world_size, world_size, f"tcp://127.0.0.1:{free_port()}")


def join(rank: int, world_size: int, address: str, **settings: object) -> SharedMemoryCommunicator:
    torch.set_num_threads(1)
    spec = GroupSpec("tp", tuple(range(world_size)), rank, init_method=address)
    return SharedMemoryCommunicator(spec, HOST, **{"timeout": 60.0, "buffer_bytes": 4096, **settings})


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank)).to(dtype)


def sums_and_gathers(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    assert comm.uses_shared_memory
    for size in (1, 3, 1023, 1024, 1025, 2048, 5000):  # around the size of a buffer, and several rounds
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            everyone = [(numbers(r, size, torch.float32) * 10).to(dtype) for r in range(world_size)]
            mine = everyone[rank].clone()
            found = comm.all_reduce(mine)
            assert found is mine and found.dtype == dtype
            wide = torch.stack(everyone).to(torch.float64).sum(dim=0)
            tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.int64: 0}[dtype]
            assert ((found.double() - wide).abs() <= tolerance * (wide.abs() + 1)).all()
            copies = comm.all_gather(found.view(1, -1), dim=0)
            assert all(torch.equal(copy, found) for copy in copies), "ranks differ in some bit"
    for dim in (0, 1, -1):
        mine = torch.arange(6.0).view(2, 3).t() + 10 * rank
        parts = [torch.arange(6.0).view(2, 3).t() + 10 * r for r in range(world_size)]
        assert torch.equal(comm.all_gather(mine, dim), torch.cat(parts, dim))
    assert comm.all_gather(torch.empty(0, 2), 0).shape == (0, 2)
    odd = comm.all_reduce(torch.tensor([float("inf"), float("nan"), 1.0]).bfloat16())
    assert odd[0].isinf() and odd[1].isnan() and odd[2] == world_size
    comm.close()
    comm.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_and_gathers_of_every_size(world_size: int) -> None:
    spawn(sums_and_gathers, world_size)


def many_rounds(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    comm._shared.round = 2**32 - 300  # the count wraps during the test
    assert comm._memory is not None
    for r in range(world_size):
        comm._memory[64 * r : 64 * r + 4] = comm._shared.round.to_bytes(4, "little")
    comm.barrier()
    for i in range(2000):
        if (i * 7 + rank) % 97 == 0:
            time.sleep(0.001)  # the ranks are late in turn
        mine = torch.full((1 + i % 50,), float(rank + i))
        assert (comm.all_reduce(mine) == sum(r + i for r in range(world_size))).all()
    comm.close()


def test_rounds_stay_separate_whichever_rank_is_late() -> None:
    spawn(many_rounds, 2)


def without_memory(rank: int, world_size: int, address: str) -> None:
    if rank == 1:
        module._map_memory = lambda *args: None  # as if on another machine
    comm = join(rank, world_size, address)
    assert not comm.uses_shared_memory
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    comm.close()


def test_ranks_that_cannot_share_memory_agree_on_sockets() -> None:
    spawn(without_memory, 2)


def refused(*_: object) -> None:
    raise PermissionError


def short_of_memory(rank: int, world_size: int, address: str) -> None:
    if rank == 0:  # the rank that creates the memory
        host_resources.memory_free = lambda: 10_000
    comm = join(rank, world_size, address)
    assert not comm.uses_shared_memory
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    comm.close()


def not_allowed_memory(rank: int, world_size: int, address: str) -> None:
    os.memfd_create = refused
    comm = join(rank, world_size, address)
    assert not comm.uses_shared_memory
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    comm.close()


@pytest.mark.parametrize("body", [short_of_memory, not_allowed_memory])
def test_all_ranks_use_sockets_if_memory_cannot_be_allocated(body: Callable[..., None]) -> None:
    spawn(body, 2)


def test_every_page_is_allocated_and_the_memory_cannot_shrink() -> None:
    fd = module._create_memory(64 << 10, bytes(16))
    try:
        assert os.fstat(fd).st_blocks * 512 >= 64 << 10
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def peer_dies(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has died while rank 0 waited"):
        comm.all_reduce(torch.ones(3))
    os._exit(0)


def test_a_dead_rank_is_named_before_the_timeout() -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        spawn(peer_dies, 2)


def peer_hangs(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    comm.barrier()
    if rank == 1:
        comm.recv((1,), torch.int64, 0)  # alive, but not in the all-reduce
        os._exit(0)
    comm._timeout = 2.0
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has not joined a collective for 2 s; rank 0 gave up"):
        comm.all_reduce(torch.ones(3))
    comm.send(torch.ones(1, dtype=torch.int64), 1)
    os._exit(0)


def test_a_stuck_rank_is_named_after_the_timeout() -> None:
    spawn(peer_hangs, 2)


class Step:
    """A tensor-parallel step of two ranks, replayed and called. Results are equal on all ranks."""

    def __init__(self, rank: int, comm: SharedMemoryCommunicator) -> None:
        loaded = kernels.load()
        ops, linear = KernelOps(loaded.library), Linear(loaded.library, loaded.isa)
        table, ones = numbers(rank, 50 * WIDTH, torch.bfloat16).view(50, WIDTH), torch.ones(WIDTH).bfloat16()
        own_weight, shared_weight = (
            linear.pack(numbers(r, WIDTH**2, torch.bfloat16).view(WIDTH, WIDTH)) for r in (rank, 9)
        )

        def called(ids: torch.Tensor) -> torch.Tensor:
            x = comm.all_reduce(ops.embedding(ids, table))
            x = comm.all_reduce(linear.linear(ops.rms_norm(x, ones, 1e-5), own_weight, None))
            return linear.linear(x, shared_weight, None)

        self.called = called
        self.replayed = Replay(loaded.library).compile(called, dynamic=True)
        self.inputs = torch.tensor([7, 8, 9])
        self.replayed(self.inputs)
        assert None not in self.replayed._programs.values()

    def leave_in_the_middle(self, comm: SharedMemoryCommunicator) -> None:
        """Takes part in the first of the two all-reduces only."""
        comm.all_reduce(torch.zeros(len(self.inputs), WIDTH).bfloat16())


def mixed_replays_and_calls(buffer_bytes: int, rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address, buffer_bytes=buffer_bytes)
    step = Step(rank, comm)
    for i in range(40):
        ids = torch.tensor([i, (3 * i) % 50, 49])
        expected = step.called(ids)
        found = [step.replayed, step.called][(i // 2 + rank) % 2](ids)  # one rank replays, the other calls
        assert torch.equal(found, expected) and torch.equal(step.replayed(ids), expected)
        if i % 3 == 0:  # another collective in between
            both = comm.all_gather(expected[:1, : 1 + i], 0)
            assert torch.equal(both[0], both[1])
        elif i % 5 == 0:
            assert (comm.all_reduce(torch.full((1 + 50 * i,), 1.0 + rank)) == 3).all()
    rounds = comm.all_gather(torch.tensor([comm._shared.round]), 0).tolist()
    assert rounds[0] == rounds[1] > 40 * 3 * 2
    comm.close()


@pytest.mark.parametrize("buffer_bytes", [4096, 256])  # 256 is less than one all-reduce of the step
def test_replays_and_calls_of_a_step_are_bit_identical_in_any_order(buffer_bytes: int) -> None:
    spawn(partial(mixed_replays_and_calls, buffer_bytes), 2)


def peer_dies_in_a_replay(rank: int, world_size: int, address: str) -> None:
    module._TIMEOUT_MS = 50
    comm = join(rank, world_size, address)
    step = Step(rank, comm)
    comm.barrier()
    if rank == 1:
        step.leave_in_the_middle(comm)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has died while rank 0 waited for its part of a sum"):
        step.replayed(step.inputs)
    os._exit(0)


def test_a_rank_that_dies_in_the_middle_of_a_replay_is_named() -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        spawn(peer_dies_in_a_replay, 2)


def peer_hangs_in_a_replay(rank: int, world_size: int, address: str) -> None:
    module._TIMEOUT_MS = 50
    comm = join(rank, world_size, address)
    step = Step(rank, comm)
    comm.barrier()
    if rank == 1:
        step.leave_in_the_middle(comm)
        comm.recv((1,), torch.int64, 0)  # alive, but not in the all-reduce
        os._exit(0)
    comm._timeout = 1.0
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has not joined a collective for 1 s; rank 0 gave up"):
        step.replayed(step.inputs)
    comm.send(torch.ones(1, dtype=torch.int64), 1)
    os._exit(0)


def test_a_rank_that_is_stuck_in_the_middle_of_a_replay_is_named_after_the_timeout() -> None:
    spawn(peer_hangs_in_a_replay, 2)


def peer_is_late_in_a_replay(rank: int, world_size: int, address: str) -> None:
    module._TIMEOUT_MS = 20
    comm = join(rank, world_size, address)
    step = Step(rank, comm)
    expected = step.called(step.inputs)
    comm.barrier()
    if rank == 1:
        comm.recv((1,), torch.int64, 0)  # arrives after the timeout of the other rank
    else:
        checked_pids = []

        def record_check(pid: int) -> bool:
            checked_pids.append(pid)
            if len(checked_pids) == 2:
                comm.send(torch.ones(1, dtype=torch.int64), 1)
            return True

        module._is_alive = record_check
    assert torch.equal(step.replayed(step.inputs), expected)
    assert torch.equal(step.replayed(step.inputs), step.called(step.inputs))
    comm.close()


def test_a_replay_resumes_when_a_late_rank_arrives() -> None:
    spawn(peer_is_late_in_a_replay, 2)


def bound_to_cores(which: list[int], rank: int, world_size: int, address: str) -> None:
    cpus = [core.cpu for core in host_resources.physical_cores()]
    os.environ["OMP_NUM_THREADS"] = "1"  # as the platform sets it for workers
    os.sched_setaffinity(0, [cpus[which[rank]]])
    comm = join(rank, world_size, address)
    assert (comm._shared.spin_ns > 0) == (len(set(which)) == world_size)
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    comm.close()


@pytest.mark.skipif(host_resources.num_cores_of_processes([0]) < 2, reason="one core")
@pytest.mark.parametrize("which", [[0, 1], [1, 1]])
def test_ranks_spin_if_each_has_its_own_core(which: list[int]) -> None:
    spawn(partial(bound_to_cores, which), 2)


def leave_nothing(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    assert comm.uses_shared_memory
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in mapped if "/dev/shm/" in line and "mvllm" in line and not line.endswith("(deleted)")]
    comm.close()


def test_the_memory_has_no_name_in_the_file_system() -> None:
    spawn(leave_nothing, 2)
