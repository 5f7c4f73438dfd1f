"""COM: collectives of a group of ranks, each in its own process."""

from __future__ import annotations

import pytest

from mvllm.extension_api.testing import GroupCoordinator
from mvllm.plugin_api import DeviceRuntime
from mvllm_conformance.markers import clause, exhaustive, skip_not_claimed, skip_not_run
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import RankResult, parallel_config, ranks_skip_reason, run_collectives, topology_of

WORLDS = [2, pytest.param(4, marks=exhaustive)]


def ranks_of(subject: PlatformUnderTest, world_size: int) -> tuple[RankResult, ...]:
    """The results of all checks in a group of `world_size` ranks."""
    topology = topology_of(subject, parallel_config(tensor=world_size))
    if topology.num_workers != world_size:
        skip_not_claimed(
            f"{world_size} ranks are {topology.num_workers} workers, which do not communicate through core"
        )
    if not subject.capabilities.collectives:
        skip_not_claimed("collectives")
    if why := ranks_skip_reason(subject, world_size):
        skip_not_run(why)
    return run_collectives(subject, world_size)


def assert_passed(results: tuple[RankResult, ...], check: str) -> None:
    errors = {rank: error for rank, result in enumerate(results) if (error := result.error_of(check))}
    assert not errors, f"{check}: " + "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())


def assert_ended(results: tuple[RankResult, ...]) -> None:
    for rank, result in enumerate(results):
        assert not result.hung_in(), f"rank {rank}: {result.error_of('join')}"
        assert result.status == 0, f"rank {rank} ended with status {result.status}: {result.output[-1500:]}"


@clause("COM-01")
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_ranks_find_each_other_and_agree_who_is_who(subject: PlatformUnderTest, world_size: int) -> None:
    results = ranks_of(subject, world_size)
    for step in ("bind", "join"):
        assert_passed(results, step)


@clause("COM-01")
@pytest.mark.parametrize("world_size", WORLDS)
def test_calls_made_in_the_same_order_meet(subject: PlatformUnderTest, world_size: int) -> None:
    """Runs every claimed collective in every dtype and shape; no rank hangs."""
    results = ranks_of(subject, world_size)
    assert_ended(results)
    orders = {tuple(result.answers) for result in results}
    assert len(orders) == 1, orders


@clause("COM-02")
@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_results_are_the_same_bits_on_all_ranks(subject: PlatformUnderTest, world_size: int, what: str) -> None:
    if what not in subject.capabilities.collectives:
        skip_not_claimed(what)
    # The clause of each operation covers the values.
    results = ranks_of(subject, world_size)
    failed = [result.error_of(what) for result in results if what not in result.answers]
    assert not failed, f"{what} failed on {len(failed)} of {world_size} ranks: {failed}"
    assert len({result.answers[what]["digest"] for result in results}) == 1


@clause("COM-03")
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_reduce(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "all_reduce")


@clause("COM-04")
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_gather(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "all_gather")


@clause("COM-05")
@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_scatter(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "reduce_scatter")


@clause("COM-06")
@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "broadcast")


@clause("COM-07")
@pytest.mark.parametrize("world_size", WORLDS)
def test_send_and_recv(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "send_recv")


@clause("COM-08")
@pytest.mark.parametrize("world_size", WORLDS)
def test_gather(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "gather")


@clause("COM-09")
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "all_to_all")


@clause("COM-10")
@pytest.mark.parametrize("world_size", WORLDS)
def test_barrier(subject: PlatformUnderTest, world_size: int) -> None:
    assert_passed(ranks_of(subject, world_size), "barrier")


@clause("COM-11")
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_group_may_be_left_twice(subject: PlatformUnderTest, world_size: int) -> None:
    results = ranks_of(subject, world_size)
    assert_passed(results, "close")
    assert_ended(results)


@clause("COM-01")
def test_a_rank_on_its_own_asks_the_platform_for_nothing(
    subject: PlatformUnderTest, bound_device: DeviceRuntime
) -> None:
    import torch

    alone = GroupCoordinator.single("tp")
    tensor = bound_device.to_device(torch.arange(6.0).view(2, 3))
    for same in (alone.all_reduce(tensor), alone.all_gather(tensor), alone.broadcast(tensor)):
        assert bound_device.to_host(same).wait().tolist() == [[0, 1, 2], [3, 4, 5]]
    alone.close()
