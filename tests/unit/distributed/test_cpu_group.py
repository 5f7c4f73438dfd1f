"""CpuGroup: exchanges bytes between ranks, the same on every platform, and never through a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mvllm.config.engine_config import ParallelConfig
from mvllm.distributed.cpu_group import CpuGroup
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.distributed.parallel_groups import join_groups
from mvllm.distributed.torch_communicator import TorchCommunicator
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.communicator import Communicator
from mvllm.platform.topology import GroupSpec, WorkerContext
from mvllm.worker.pipeline_transport import PipelineTransport
from tests.helpers.forked_ranks import start_ranks
from tests.helpers.thread_ranks import ThreadCommunicator, _ThreadRendezvous, run_ranks
from tests.unit.distributed.test_torch_communicator import spawn
from tests.unit.worker.builders import HostRuntime, make_rows

DEVICE = torch.device("cpu")
SIZES = (0, 1, 4095, 4096, 4097, 100_000)


def payload_of(rank: int, size: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(size))


def exchange(group: CpuGroup) -> None:
    """Payloads of sizes around the first message's, between all pairs of ranks."""
    rank = group.rank
    others = [other for other in range(group.world_size) if other != rank]
    for size in SIZES:
        group.send(payload_of(rank, size), *others)
        group.send(b"second", *others)
        for source in others:
            assert group.receive(source) == payload_of(source, size)
            assert group.receive(source) == b"second"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_of_any_length_arrive_completely_and_in_order(world_size: int) -> None:
    run_ranks(world_size, lambda group: exchange(group.cpu_group))


def test_a_group_of_one_rank_has_no_communicator() -> None:
    group = GroupCoordinator.single("tp").cpu_group
    assert (group.rank, group.world_size, group.communicator) == (0, 1, None)
    group.close()


def test_a_communicator_for_host_tensors_serves_both_groups() -> None:
    communicator = ThreadCommunicator(_ThreadRendezvous(2), 0, 2)
    group = GroupCoordinator(GroupSpec("tp", (0, 1), 0), communicator)
    assert group.device_group is communicator and group.cpu_group.communicator is communicator


def test_a_device_group_without_a_host_group_is_refused() -> None:
    communicator = ThreadCommunicator(_ThreadRendezvous(2), 0, 2)
    communicator.on_host = False
    with pytest.raises(ValueError, match="'pp' has no communicator for tensors in host memory"):
        GroupCoordinator(GroupSpec("pp", (0, 1), 0), communicator)


class OnDevice(TorchCommunicator):
    """Accepts floating-point tensors only, like a device communicator, and fails for bytes."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec, backend="gloo", timeout=60)
        self.on_host = False

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        assert tensor.is_floating_point(), "bytes were sent through the device"
        super().send(tensor, destination)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        assert tensor.is_floating_point(), "bytes were gathered on the device"
        return super().all_gather(tensor, dim)


class VendorCommunicator(Communicator):
    """A vendor's communicator without torch.distributed, which accepts no host tensors."""

    def __init__(self, spec: GroupSpec) -> None:
        self.rank, self.world_size = spec.rank_in_group, len(spec.ranks)

    def _refuse(self, *_: object) -> object:
        raise AssertionError("a host tensor came to the device's communicator")

    all_reduce = all_gather = reduce_scatter = broadcast = send = _refuse  # type: ignore[assignment]
    recv = gather = all_to_all = barrier = _refuse  # type: ignore[assignment]


def device_groups(rank: int, world_size: int, address: str, kind: type, tp: int, pp: int) -> None:
    """Joins like a worker does, then sends sampled tokens from the last stage to the others."""
    torch.set_num_threads(1)
    platform = SimpleNamespace(spec=SimpleNamespace(name="acme"), communicator=lambda group, device: kind(group))
    ctx = WorkerContext(rank, rank, world_size, world_size, init_method=address)
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    groups = join_groups(parallel, platform, ctx, DEVICE)  # type: ignore[arg-type]
    for group in (groups.tp, groups.pp):
        if group.world_size > 1:
            assert isinstance(group.device_group, kind) and group.cpu_group.communicator is not group.device_group
            exchange(group.cpu_group)
    if pp > 1:
        pipeline = PipelineTransport(
            groups.pp, HostRuntime(), hidden_size=2, dtype=torch.float32, every_rank_answers=True
        )
        output = ModelRunnerOutput(step=7, sampled_token_ids=list(range(3000)))
        if pipeline.is_last:
            pipeline.send_output(output, any_sampled=True)
        else:
            no_rows = np.zeros(0, dtype=np.int64)
            pipeline.expect_output(7, no_rows, no_rows)
            assert pipeline.collect_output(7, make_rows()).sampled_token_ids == output.sampled_token_ids
    groups.close()
    assert not dist.is_initialized(), "a group was left behind"


def device_pair(rank: int, world_size: int, address: str) -> None:
    device_groups(rank, world_size, address, OnDevice, 1, 2)


def device_square(rank: int, world_size: int, address: str) -> None:
    device_groups(rank, world_size, address, OnDevice, 2, 2)


def foreign_pair(rank: int, world_size: int, address: str) -> None:
    device_groups(rank, world_size, address, VendorCommunicator, 2, 1)


def foreign_square(rank: int, world_size: int, address: str) -> None:
    device_groups(rank, world_size, address, VendorCommunicator, 2, 2)


@pytest.mark.parametrize(
    ("body", "world_size"), [(device_pair, 2), (device_square, 4), (foreign_pair, 2), (foreign_square, 4)]
)
def test_a_device_group_has_a_separate_group_for_bytes(body, world_size: int) -> None:
    spawn(body, world_size)


def test_both_groups_are_joined_through_a_file_rendezvous(tmp_path: Path) -> None:
    start_ranks(through_a_file, 2, f"file://{tmp_path}/rendezvous")


def through_a_file(rank: int, address: str) -> None:
    device_groups(rank, 2, address, OnDevice, 1, 2)
