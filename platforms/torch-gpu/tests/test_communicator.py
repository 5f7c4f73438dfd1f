"""Communicators over gloo instead of NCCL: the small all-reduce is used only if it is correct on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mvllm.plugin_api import GroupSpec, PlatformError
from mvllm_torch_gpu import communicator, custom_all_reduce
from mvllm_torch_gpu.communicator import NcclCommunicator
from tests.helpers.forked_ranks import start_ranks
from tests.helpers.ports import free_port

HOST = torch.device("cpu")


def free_address() -> str:
    """A free address for the ranks' rendezvous."""
    return f"tcp://127.0.0.1:{free_port()}"


class FakeSmallAllReduce:
    """A SmallAllReduce over gloo, with the fault `kind`.

    Attributes:
        summed_sizes: Number of elements of each all-reduced tensor.
        closed: Whether `close` was called.
    """

    def __init__(self, kind: str, rank: int) -> None:
        self._kind, self._rank = kind, rank
        self.summed_sizes: list[int] = []
        self.closed = False

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= 4096 or self._kind == "wrong in two shots"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed_sizes.append(tensor.numel())
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        two_shots = tensor.nbytes > custom_all_reduce.ONE_SHOT_BYTES
        if self._kind == f"wrong on rank {self._rank}" or (self._kind == "wrong in two shots" and two_shots):
            tensor += 1
        if self._kind == f"other bits on rank {self._rank}":
            tensor[0] = torch.nextafter(tensor[0], torch.tensor(torch.inf, dtype=tensor.dtype))
        if self._kind == f"fails on rank {self._rank}":
            raise RuntimeError("the memory is gone")
        return tensor

    def close(self) -> None:
        self.closed = True


def check_all_reduce(rank: int, address: str, kind: str) -> None:
    """A rank: its sums are correct, and it uses the small all-reduce only if that is correct on both ranks."""
    made: list[FakeSmallAllReduce] = []

    def make(of: NcclCommunicator, device: torch.device) -> FakeSmallAllReduce:
        if kind == f"raises on rank {rank}":
            raise PlatformError("this rank cannot map memory")
        made.append(FakeSmallAllReduce(kind, rank))
        return made[0]

    communicator._direct = make
    communicator.problem_of = lambda *_: "no peer access" if kind == f"cannot on rank {rank}" else None
    if kind == "several machines":
        communicator.platform.node = lambda: f"host-{rank}"
    spec = GroupSpec("tp", (0, 1), rank, init_method=address)
    comm = NcclCommunicator(spec, HOST, custom_all_reduce=True, backend="gloo", timeout=60.0)
    tried = len(made[0].summed_sizes) if made else 0
    assert comm.all_reduce(torch.tensor([1.0 + rank, 2.0])).tolist() == [3.0, 4.0]
    assert comm.all_reduce(torch.full((5000,), 1.0 + rank)).tolist() == [3.0] * 5000
    comm.close()
    comm.close()
    assert [size for other in made for size in other.summed_sizes[tried:]] == ([2] if kind == "right" else [])
    assert all(other.closed for other in made)
    if kind in ("cannot on rank 1", "several machines"):
        assert not made, "a rank would wait for the other in the mapping"


def send_before_receiving(rank: int, address: str) -> None:
    """A rank: all ranks send twice to all others before they receive."""
    comm = NcclCommunicator(GroupSpec("pp", (0, 1, 2), rank, init_method=address), HOST, backend="gloo", timeout=60.0)
    others = [other for other in range(3) if other != rank]
    for turn in (0, 1):
        for other in others:
            comm.send(torch.tensor([100 * rank + 10 * other + turn]), other)
    for turn in (0, 1):
        for other in others:
            assert int(comm.recv((1,), torch.int64, other)) == 100 * other + 10 * rank + turn
    comm.barrier()
    comm.close()


def test_all_ranks_may_send_before_they_receive():
    start_ranks(send_before_receiving, 3, free_address())


@pytest.mark.parametrize(
    "kind",
    [
        "right",
        "wrong on rank 1",
        "other bits on rank 1",
        "wrong in two shots",
        "raises on rank 1",
        "fails on rank 0",
        "cannot on rank 1",
        "several machines",
    ],
)
def test_the_small_all_reduce_is_used_only_if_it_is_correct_on_all_ranks(kind):
    start_ranks(check_all_reduce, 2, free_address(), kind)


def test_ranks_that_cannot_connect_raise_with_a_hint():
    alone = GroupSpec("tp", (0, 1), 0, init_method="tcp://127.0.0.1:1")
    with pytest.raises(PlatformError, match=r"ranks \[0, 1\] of group 'tp' do not find each other.*NCCL_DEBUG=INFO"):
        NcclCommunicator(alone, HOST, backend="an-unknown-backend", timeout=0.2)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8,), torch.bfloat16, True),
        ((64, 8192), torch.bfloat16, True),
        ((512, 8192), torch.bfloat16, False),  # too large
        ((3,), torch.float32, False),  # not a multiple of the alignment
        ((0,), torch.float32, False),
        ((8,), torch.float16, False),  # the kernels do not support float16
        ((8,), torch.int32, False),
    ],
)
def test_tensors_that_the_small_all_reduce_supports(shape, dtype, expected):
    assert custom_all_reduce.fits(torch.empty(shape, dtype=dtype)) is expected


def test_a_rank_says_why_it_cannot_take_part():
    problem = custom_all_reduce.problem_of([0, 1], torch.device("cuda", 0), None)
    assert problem == "The ranks' processes see different devices: theirs are numbered [0, 1], and this one sees 0."


def test_devices_without_peer_access_are_named():
    custom_all_reduce.check_peer_access([0, 1, 2, 3], 4, 1, lambda device, other: True)
    with pytest.raises(PlatformError, match=r"device 1 cannot read the memory of \[3\]"):
        custom_all_reduce.check_peer_access([0, 1, 2, 3], 4, 1, lambda device, other: other != 3)
    with pytest.raises(PlatformError, match="9 ranks are more than 8"):
        custom_all_reduce.check_peer_access(range(9), 16, 0, lambda device, other: True)
    for devices in ([0, 1], [0, 0]):
        with pytest.raises(PlatformError, match="see different devices"):
            custom_all_reduce.check_peer_access(devices, 1, 0, lambda device, other: True)


def test_the_devices_of_the_group_are_asked_and_no_others():
    """The second of two groups has the devices 2 and 3."""
    asked = []
    custom_all_reduce.check_peer_access([2, 3], 4, 3, lambda *pair: asked.append(pair) or True)
    assert asked == [(3, 2)]


def test_ranks_without_a_link_between_their_devices_use_the_library(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    device = torch.device("cuda", 3)
    assert custom_all_reduce.problem_of([2, 3], device, lambda mine, others: f"{mine} to {others}") == "3 to [2]"
    assert custom_all_reduce.problem_of([2, 3], device, lambda mine, others: None) is None
