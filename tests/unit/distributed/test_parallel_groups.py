"""The process groups of each rank, and invalid sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mvllm.config.engine_config import ParallelConfig
from mvllm.distributed.parallel_groups import group_ranks, join_groups
from mvllm.errors import ConfigError, PlatformError
from mvllm.platform.topology import WorkerContext
from tests.helpers.thread_ranks import ThreadCommunicator, _ThreadRendezvous

DEVICE = torch.device("cpu")


class ThreadGroupPlatform:
    """Records the groups that were requested and closed."""

    spec = SimpleNamespace(name="acme")

    def __init__(self) -> None:
        self.asked, self.closed = [], []

    def communicator(self, group, device):
        self.asked.append(group)
        found = ThreadCommunicator(_ThreadRendezvous(len(group.ranks)), group.rank_in_group, len(group.ranks))
        found.close = lambda: self.closed.append(group.name)
        return found


def config(tp: int, pp: int) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)


def context(rank: int, world_size: int, **fields) -> WorkerContext:
    return WorkerContext(
        rank=rank, local_rank=rank % 2, world_size=world_size, **{"init_method": "tcp://x:1", **fields}
    )


def test_consecutive_ranks_form_tensor_parallel_groups_and_strided_ranks_pipelines() -> None:
    groups = [group_ranks(config(2, 3), rank) for rank in range(6)]
    assert groups == [
        ((0, 1), (0, 2, 4)),
        ((0, 1), (1, 3, 5)),
        ((2, 3), (0, 2, 4)),
        ((2, 3), (1, 3, 5)),
        ((4, 5), (0, 2, 4)),
        ((4, 5), (1, 3, 5)),
    ]


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    for tp in (1, 2, 4):
        for pp in (1, 2, 3):
            for kind in (0, 1):
                distinct = {group_ranks(config(tp, pp), rank)[kind] for rank in range(tp * pp)}
                assert sorted(rank for ranks in distinct for rank in ranks) == list(range(tp * pp))
            for rank in range(tp * pp):
                assert all(rank in ranks for ranks in group_ranks(config(tp, pp), rank))


def test_a_rank_has_its_groups_and_leaves_them_in_reverse_order() -> None:
    platform = ThreadGroupPlatform()
    groups = join_groups(config(2, 2), platform, context(3, 4), DEVICE)
    assert [(g.name, g.ranks, g.init_method, g.world_size) for g in platform.asked] == [
        ("tp", (2, 3), "tcp://x:1", 4),
        ("pp", (1, 3), "tcp://x:1", 4),
    ]
    for group in (groups.tp, groups.pp):
        assert (group.rank, group.local_rank, group.rank_in_group, group.world_size) == (3, 1, 1, 2)
    groups.close()
    assert platform.closed == ["pp", "tp"]


def test_groups_of_one_rank_create_no_communicator() -> None:
    platform = ThreadGroupPlatform()
    groups = join_groups(config(1, 2), platform, context(1, 2), DEVICE)
    assert [group.name for group in platform.asked] == ["pp"]
    assert groups.tp.world_size == 1 and groups.pp.is_last


def test_one_worker_joins_no_group_whatever_its_number_of_devices() -> None:
    groups = join_groups(config(4, 1), ThreadGroupPlatform(), WorkerContext(num_devices=4), DEVICE)
    assert (groups.tp.world_size, groups.pp.world_size) == (1, 1)


def test_the_devices_of_a_worker_are_one_rank_of_its_group() -> None:
    platform = ThreadGroupPlatform()
    groups = join_groups(config(4, 2), platform, context(1, 4, num_devices=2), DEVICE)
    assert [(group.name, group.ranks) for group in platform.asked] == [("tp", (0, 1)), ("pp", (1, 3))]
    assert (groups.tp.world_size, groups.pp.world_size) == (2, 2)


def test_a_worker_does_not_hold_several_stages() -> None:
    with pytest.raises(ConfigError, match="makes 2 ranks, but 1 were started with 2 devices each"):
        join_groups(config(1, 2), ThreadGroupPlatform(), WorkerContext(num_devices=2), DEVICE)


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 × pipeline_parallel_size 2 makes 4 ranks, but 3 were started"):
        join_groups(config(2, 2), ThreadGroupPlatform(), context(0, 3), DEVICE)


def test_ranks_without_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="need a rendezvous address"):
        join_groups(config(2, 1), ThreadGroupPlatform(), context(0, 2, init_method=None), DEVICE)


def test_a_platform_that_returns_no_communicator_is_named() -> None:
    platform = ThreadGroupPlatform()
    platform.communicator = lambda group, device: None
    with pytest.raises(PlatformError, match="'acme' returned a NoneType from communicator"):
        join_groups(config(2, 1), platform, context(0, 2), DEVICE)
