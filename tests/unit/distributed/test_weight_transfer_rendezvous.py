"""Ranks of a weight transfer group that come, leave, and come back at the same address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from mvllm.distributed import weight_transfer_rendezvous as rendezvous
from mvllm.distributed.weight_transfer_rendezvous import meet
from mvllm.errors import RequestError
from mvllm.messages.weights import WeightTransferInfo
from tests.helpers.ports import free_port, listens

Met = tuple[Any, str]


class Rank:
    """A thread that waits for a group of three ranks at `port`."""

    def __init__(self, port: int, rank: int, timeout: float = 120.0) -> None:
        self.given_up = threading.Event()
        self.info = WeightTransferInfo(master_address="127.0.0.1", master_port=port, world_size=3, timeout=timeout)
        with_own_thread = ThreadPoolExecutor(1)
        self.met: Future[Met] = with_own_thread.submit(meet, self.info, rank, self.given_up)
        with_own_thread.shutdown(wait=False)

    def leave(self) -> None:
        self.given_up.set()
        with pytest.raises(RequestError, match="not complete"):
            self.met.result(120)

    @property
    def group_id(self) -> str:
        return self.met.result(120)[1]


@pytest.fixture
def port() -> int:
    return free_port()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_come(info: WeightTransferInfo, rank: int) -> bool:
    """Whether the trainer knows of a rank."""
    return bool(rendezvous._read(rendezvous._open_store(info, 10, is_trainer=False), rendezvous._member(rank)))


def test_a_rank_that_comes_back_does_not_count_as_another_one(port: int) -> None:
    trainer = Rank(port, 0)
    for _ in range(3):  # as many as would make a group, without rank 2
        first = Rank(port, 1)
        wait_until(lambda: has_come(first.info, 1))  # noqa: B023
        first.leave()
    second = Rank(port, 2)
    wait_until(lambda: has_come(second.info, 2))
    time.sleep(0.1)
    assert not trainer.met.done() and not second.met.done(), "rank 1 has left"
    first = Rank(port, 1)
    assert trainer.group_id == first.group_id == second.group_id


def test_ranks_wait_for_the_next_trainer_if_one_ends(port: int) -> None:
    first, second = Rank(port, 1), Rank(port, 2)
    short = WeightTransferInfo(master_address="127.0.0.1", master_port=port, world_size=4, timeout=0.3)
    with pytest.raises(RequestError, match="of 4 ranks these have not joined: 3"):  # another world_size
        meet(short, 0, threading.Event())
    wait_until(lambda: not listens(port))
    trainer = Rank(port, 0)
    assert trainer.group_id == first.group_id == second.group_id


def test_a_late_call_for_a_complete_group_is_told_so(port: int) -> None:
    trainer, first, second = Rank(port, 0), Rank(port, 1), Rank(port, 2)
    assert trainer.group_id == first.group_id == second.group_id
    late = Rank(port, 1)
    with pytest.raises(RequestError, match="is complete, and its rank 1 is another process or an earlier call"):
        late.met.result(120)


def test_the_port_of_a_failed_trainer_is_free_while_its_error_is_kept(port: int) -> None:
    with pytest.raises(RequestError, match="of 3 ranks these have not joined: 1, 2") as kept:
        meet(
            WeightTransferInfo(master_address="127.0.0.1", master_port=port, world_size=3, timeout=0.05),
            0,
            threading.Event(),
        )
    assert not listens(port)
    assert kept.value.parameter is None
