"""Every collective of TorchCommunicator, between processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.distributed.torch_communicator import TorchCommunicator
from mvllm.errors import PlatformError
from mvllm.executor.process.process_utils import anonymous_file
from mvllm.platform.topology import GroupSpec
from tests.helpers.forked_ranks import start_ranks
from tests.helpers.ports import free_port


def spawn(body: Callable[..., None], world_size: int) -> None:
    """Runs `body(rank, world_size, address)` in as many processes; fails if one fails."""
    start_ranks(body, world_size, world_size, f"tcp://127.0.0.1:{free_port()}")


def one_group(rank: int, world_size: int, address: str) -> None:
    torch.set_num_threads(1)
    spec = GroupSpec("tp", tuple(range(world_size)), rank, init_method=address)
    comm = TorchCommunicator(spec, backend="gloo", timeout=60)
    assert (comm.rank, comm.world_size) == (rank, world_size)
    total = sum(range(1, world_size + 1))

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        assert (comm.all_reduce(torch.full((2, 3), rank + 1, dtype=dtype)) == total).all()
    strided = torch.full((3, 2), float(rank + 1)).t()
    assert (comm.all_reduce(strided) == total).all()

    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    everyone = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(world_size)]
    for dim in (0, 1, -1):
        torch.testing.assert_close(comm.all_gather(mine, dim), torch.cat(everyone, dim))
        gathered = comm.gather(mine, destination=world_size - 1, dim=dim)
        if rank == world_size - 1:
            torch.testing.assert_close(gathered, torch.cat(everyone, dim))
        else:
            assert gathered is None

    whole = torch.arange(4.0 * world_size).view(2, -1) * (rank + 1)
    expected = (torch.arange(4.0 * world_size).view(2, -1) * total).chunk(world_size, dim=-1)[rank]
    torch.testing.assert_close(comm.reduce_scatter(whole), expected)
    try:
        comm.reduce_scatter(torch.ones(2, 2 * world_size + 1))
        raise SystemExit("an uneven share was accepted")
    except ValueError as e:
        assert "evenly" in str(e)

    given = torch.full((3,), float(rank))
    assert comm.broadcast(given, source=1) is given
    assert (given == 1).all()

    if rank == 0:
        comm.send(torch.arange(5, dtype=torch.int32), 1)
        assert comm.recv((2, 2), torch.float32, 1).sum() == 8
    elif rank == 1:
        assert comm.recv((5,), torch.int32, 0).tolist() == [0, 1, 2, 3, 4]
        comm.send(torch.full((2, 2), 2.0), 0)

    # Shapes differ between destinations; every rank passes the same list of them.
    sent = [torch.full((to + 1, 2), float(10 * rank + to)) for to in range(world_size)]
    received = comm.all_to_all(sent)
    for source, tensor in enumerate(received):
        assert tensor.shape == (rank + 1, 2)
        assert (tensor == 10 * source + rank).all()

    comm.barrier()
    comm.close()
    comm.close()


def test_every_collective_between_two_processes() -> None:
    spawn(one_group, 2)


def two_groups(rank: int, world_size: int, address: str) -> None:
    """Four ranks: tensor-parallel pairs 0 1 and 2 3, pipeline pairs 0 2 and 1 3."""
    torch.set_num_threads(1)
    tp_ranks = (0, 1) if rank < 2 else (2, 3)
    pp_ranks = (rank % 2, rank % 2 + 2)
    groups = [
        GroupCoordinator(spec, TorchCommunicator(spec, backend="gloo", timeout=60))
        for spec in (
            GroupSpec("tp", tp_ranks, rank, address, world_size),  # a part of the world may be the first group
            GroupSpec("world", (0, 1, 2, 3), rank, address, world_size),
            GroupSpec("pp", pp_ranks, rank, address, world_size),
        )
    ]
    tp, world, pp = groups
    mine = torch.tensor([float(rank)])
    assert world.all_gather(mine.clone()).tolist() == [0, 1, 2, 3]
    assert tp.all_gather(mine.clone()).tolist() == list(tp_ranks)
    assert pp.all_reduce(mine.clone()).item() == sum(pp_ranks)
    if pp.is_first:
        pp.send(mine, 1)
    else:
        assert pp.recv((1,), torch.float32, 0).item() == pp_ranks[0]
    assert world.device_group is not None
    world.device_group.barrier()
    for group in reversed(groups):
        group.close()


def test_groups_within_a_world_are_separate() -> None:
    spawn(two_groups, 4)


def test_a_group_of_several_ranks_needs_a_communicator() -> None:
    try:
        GroupCoordinator(GroupSpec("tp", (0, 1), 0))
    except ValueError as e:
        assert "'tp' has 2 ranks and no communicator" in str(e)
    else:
        raise AssertionError("accepted")


def exchanging(rank: int, world_size: int, address: str) -> None:
    """As a library that meets by itself does, before and after core's own group at the same address."""
    torch.set_num_threads(1)
    everyone = tuple(range(world_size))
    world = GroupSpec("tp", everyone, rank, address, world_size)
    assert world.exchange(b"" if rank else b"an address", timeout=60) == [b"an address"] + [b""] * (world_size - 1)
    comm = TorchCommunicator(world, backend="gloo", timeout=60)
    assert (comm.all_reduce(torch.ones(2)) == world_size).all()
    assert world.exchange(bytes([rank]), timeout=60) == [bytes([r]) for r in everyone]
    pair = tuple(r for r in everyone if r % 2 == rank % 2)
    assert GroupSpec("pp", pair, rank, address, world_size).exchange(b"x", timeout=60) == [b"x"] * len(pair)
    comm.close()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_exchange_addresses_at_both_kinds_of_rendezvous(kind: str) -> None:
    if kind == "tcp":
        spawn(exchanging, 3)
        return
    fd = anonymous_file("rendezvous")
    try:  # an engine's workers inherit it and open /proc/self
        start_ranks(exchanging, 3, 3, f"file:///proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def test_an_exchange_names_the_rank_that_does_not_come(tmp_path: Path) -> None:
    spec = GroupSpec("tp", (0, 1), 0, f"file://{tmp_path / 'store'}", 2)
    with pytest.raises(PlatformError, match=r"Rank 1 of the group 'tp' did not call .* within 0.2 s"):
        spec.exchange(b"", timeout=0.2)
    assert GroupSpec("tp", (1,), 1).exchange(b"alone") == [b"alone"]
    with pytest.raises(PlatformError, match="no rendezvous URL"):
        GroupSpec("tp", (0, 1), 1).exchange(b"")
