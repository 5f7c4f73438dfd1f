"""Ranks that share memory: what sockets would give, the same bits on every rank, and no wait for the dead."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from mvllm.plugin_api import GroupSpec, PlatformError
from mvllm_cpu import kernels, machine
from mvllm_cpu import shared_memory_communicator as module
from mvllm_cpu.shared_memory_communicator import SharedMemoryCommunicator
from tests.helpers.forked_ranks import start_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(kernels.load().library, "mvllm_cpu_shared_wait"), reason="the kernels are not built for this system"
)
HOST = torch.device("cpu")


def spawn(body: Callable[..., None], world_size: int) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    start_ranks(body, world_size, world_size, address)


def join(rank: int, world_size: int, address: str, **settings: object) -> SharedMemoryCommunicator:
    torch.set_num_threads(1)
    spec = GroupSpec("tp", tuple(range(world_size)), rank, init_method=address)
    return SharedMemoryCommunicator(spec, HOST, **{"timeout": 60.0, "slot_bytes": 4096, **settings})


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank)).to(dtype)


def sums_and_gathers(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    assert comm.uses_shared_memory
    for size in (1, 3, 1023, 1024, 1025, 2048, 5000):  # around the slots' size, and over several rounds
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
    comm._round = 2**32 - 300  # counts wrap on the way
    library = kernels.load().library
    assert library is not None and comm._memory is not None
    for r in range(world_size):
        comm._memory[64 * r : 64 * r + 4] = comm._round.to_bytes(4, "little")
    comm.barrier()
    for i in range(2000):
        if (i * 7 + rank) % 97 == 0:
            time.sleep(0.001)  # now the one is late, now the other
        mine = torch.full((1 + i % 50,), float(rank + i))
        assert (comm.all_reduce(mine) == sum(r + i for r in range(world_size))).all()
    comm.close()


def test_rounds_do_not_mix_whoever_is_late() -> None:
    spawn(many_rounds, 2)


def without_memory(rank: int, world_size: int, address: str) -> None:
    if rank == 1:
        module._open = lambda *args: None  # as on another machine
    comm = join(rank, world_size, address)
    assert not comm.uses_shared_memory
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    comm.close()


def test_ranks_that_cannot_share_memory_agree_on_sockets() -> None:
    spawn(without_memory, 2)


def refused(*_: object) -> None:
    raise PermissionError


def short_of_memory(rank: int, world_size: int, address: str) -> None:
    if rank == 0:  # the one that makes it
        machine.memory_free = lambda: 10_000
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
def test_where_memory_cannot_be_had_all_ranks_use_sockets(body: Callable[..., None]) -> None:
    spawn(body, 2)


def test_every_page_is_claimed_and_nobody_can_take_one_back() -> None:
    fd = module._claim(64 << 10, bytes(16))
    try:
        assert os.fstat(fd).st_blocks * 512 >= 64 << 10
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def deserted(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has died while rank 0 waited"):
        comm.all_reduce(torch.ones(3))
    assert time.monotonic() - begin < 10
    os._exit(0)


def test_a_dead_rank_is_named_within_seconds() -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        spawn(deserted, 2)


def stuck(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address, timeout=2.0)
    comm.barrier()
    if rank == 1:
        time.sleep(8)
        os._exit(0)
    with pytest.raises(PlatformError, match=r"rank 1 \(pid \d+\) has not joined a collective for 2 s; rank 0 gave up"):
        comm.all_reduce(torch.ones(3))
    os._exit(0)


def test_a_stuck_rank_is_named_after_the_timeout() -> None:
    spawn(stuck, 2)


def leave_nothing(rank: int, world_size: int, address: str) -> None:
    comm = join(rank, world_size, address)
    assert comm.uses_shared_memory
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in mapped if "/dev/shm/" in line and "mvllm" in line and not line.endswith("(deleted)")]
    comm.close()


def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    spawn(leave_nothing, 2)
