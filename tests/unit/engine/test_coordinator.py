"""The coordinator between engine cores and front ends, with the coordinator clients; real sockets, one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest

from mvllm.engine.process.coordinator import DPCoordinator
from mvllm.engine.process.coordinator_client import CoordinatorClient
from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.engine.process.message_socket import MessageSocket, message_socket_pair
from mvllm.errors import EngineDeadError
from mvllm.messages.coordinator_protocol import CoreLoad, CoreLoads, SentPrefixes, SleepDone, SleepNotice, ToFrontEnd
from mvllm.messages.requests import SchedulerStats

PROMPT = list(range(100))


class Net:
    """Two cores and two front ends around a coordinator that runs in a thread."""

    def __init__(self) -> None:
        pairs = [[MessageSocket(end) for end in message_socket_pair()] for _ in range(4)]
        self.cores = [pairs[0][0], pairs[1][0]]
        self.front_ends = [pairs[2][0], pairs[3][0]]
        self._theirs = [pair[1] for pair in pairs]
        self.coordinator = DPCoordinator(self._theirs[:2], self._theirs[2:])
        self._is_ending = False
        self.told_sleep: list[tuple[int, bool]] = []  # by whom, and whether the engine sleeps
        self._thread = threading.Thread(target=self._run, daemon=True)

    def record_sleep(self, index: int, is_sleeping: bool) -> None:
        self.told_sleep.append((index, is_sleeping))

    def _run(self) -> None:
        while not self._is_ending:
            self.coordinator.run_once()

    def __enter__(self) -> Net:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_ending = True
        self.cores[0].send(CoreLoad(0, SchedulerStats(), []))  # wakes it up
        self._thread.join(120)
        for control in (*self._theirs, *self.cores, *self.front_ends):
            control.close()


@pytest.fixture
def net() -> Iterator[Net]:
    with Net() as net:
        yield net


async def until(condition: object) -> None:
    async with asyncio.timeout(120):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def run(net: Net, work: object) -> None:
    """Runs `work` with two front ends: index 1 and 2, as cores number them."""

    async def both() -> None:
        loop = asyncio.get_running_loop()
        front_ends = [CoordinatorClient(control, index) for index, control in enumerate(net.front_ends, 1)]
        choices = [DPLoadBalancer(2, draw=lambda: 0.0) for _ in front_ends]  # the cheapest replica
        loads: list[list[CoreLoad]] = [[], []]
        for index, (front, choice, heard) in enumerate(zip(front_ends, choices, loads)):
            front.attach(loop, choice, heard.extend, partial(net.record_sleep, index))
        await work(front_ends, choices, loads)  # type: ignore[operator]
        for front in front_ends:
            front.close()

    asyncio.run(both())


def test_each_front_end_gets_the_load_of_the_others(net: Net) -> None:
    async def work(
        front_ends: list[CoordinatorClient], choices: list[DPLoadBalancer], loads: list[list[CoreLoad]]
    ) -> None:
        net.cores[0].send(CoreLoad(0, SchedulerStats(num_running=5), [0, 3, 2]))
        await until(lambda: all(loads))
        assert [choice.loads_elsewhere for choice in choices] == [[2, 0], [3, 0]]
        assert loads[0][-1].stats.num_running == 5
        assert [choices[0].choose([index], None, 1) for index in range(2)] == [1, 1]  # the other replica has more to do
        net.cores[0].send(CoreLoad(0, SchedulerStats(), [0, 0, 0]))
        net.cores[1].send(CoreLoad(1, SchedulerStats(), [0, 2, 9]))
        await until(lambda: choices[0].loads_elsewhere == [0, 9])
        await until(lambda: choices[1].loads_elsewhere == [0, 2])

    run(net, work)


def test_a_prompt_goes_to_the_replica_to_which_another_front_end_sent_its_prefix(net: Net) -> None:
    async def work(
        front_ends: list[CoordinatorClient], choices: list[DPLoadBalancer], loads: list[list[CoreLoad]]
    ) -> None:
        one, other = choices
        for salt in (None, "pepper"):
            replica = one.choose(PROMPT, salt, 1)
            one.finish_sequence(replica)
            front_ends[0].schedule_prefix_publish()
            await until(partial(other.num_cached_tokens, replica, PROMPT, salt))
            for _ in range(3):
                assert other.choose(PROMPT, salt, 1) == replica
                other.finish_sequence(replica)
        assert list(choices[0].pop_new_prefixes()) == []  # the load update has arrived

    run(net, work)


def test_a_front_end_that_closes_waits_for_no_answer(net: Net) -> None:
    async def work(
        front_ends: list[CoordinatorClient], choices: list[DPLoadBalancer], loads: list[list[CoreLoad]]
    ) -> None:
        async with asyncio.timeout(120):
            sleeping = asyncio.create_task(front_ends[0].broadcast_sleep(True))
            while not front_ends[0]._pending_sleeps:
                if sleeping.done():  # the answer was faster
                    sleeping = asyncio.create_task(front_ends[0].broadcast_sleep(True))
                await asyncio.sleep(0)
            front_ends[0].close()
            with pytest.raises(EngineDeadError):
                await sleeping

    run(net, work)


def test_sleep_is_answered_when_all_other_front_ends_sleep(net: Net) -> None:
    async def work(
        front_ends: list[CoordinatorClient], choices: list[DPLoadBalancer], loads: list[list[CoreLoad]]
    ) -> None:
        told = net.told_sleep
        async with asyncio.timeout(120):
            await front_ends[0].broadcast_sleep(True)
            assert told == [(1, True)]
            await asyncio.gather(
                front_ends[0].broadcast_sleep(False), front_ends[1].broadcast_sleep(False)
            )  # at once, even then
        assert sorted(told[1:]) == [(0, False), (1, False)]

    run(net, work)


def test_a_slow_reader_blocks_no_other_and_gets_the_latest_load_later() -> None:
    with Net() as net:
        decoder = msgspec.msgpack.Decoder(CoreLoads)

        def newest(control: MessageSocket) -> int:
            count = -1
            while (data := control.receive()) is not None:
                count = decoder.decode(data).loads[-1].stats.num_running
            return count

        async def work() -> None:
            for count in range(200):  # more updates than its socket holds, if each were published
                while not net.cores[0].send(CoreLoad(0, SchedulerStats(num_running=count), [0, 1, 1])):
                    await asyncio.sleep(0.01)
            for control in net.front_ends:
                await until(lambda control=control: newest(control) == 199)  # type: ignore[misc]

        asyncio.run(work())


def received(control: MessageSocket) -> list[ToFrontEnd]:
    decoder: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
    return [decoder.decode(data) for data in iter(control.receive, None)]


def request_sleep_with_a_full_socket(net: Net) -> None:
    """The first front end requests sleep; the socket of the second is full."""
    count = 0
    while net._theirs[3].send(SentPrefixes(0, [1 << 60] * 5000)):
        count += 1
    assert count > 0
    net.front_ends[0].send(SleepNotice(7, True))
    net.coordinator.run_once()


def test_sleep_reaches_a_front_end_with_a_full_buffer_before_it_is_answered() -> None:
    net = Net()
    request_sleep_with_a_full_socket(net)
    assert received(net.front_ends[0]) == []
    assert all(isinstance(message, SentPrefixes) for message in received(net.front_ends[1]))
    net.coordinator.run_once()
    [sleep] = received(net.front_ends[1])
    assert isinstance(sleep, SleepNotice) and sleep.is_sleeping
    net.front_ends[1].send(SleepDone(sleep.id))
    net.coordinator.run_once()
    assert received(net.front_ends[0]) == [SleepDone(7)]


def test_sleep_is_answered_without_a_front_end_that_has_exited() -> None:
    net = Net()
    request_sleep_with_a_full_socket(net)
    net.front_ends[1].close()
    net.coordinator.run_once()
    assert received(net.front_ends[0]) == [SleepDone(7)]
    net.front_ends[0].send(SleepNotice(8, False))
    net.coordinator.run_once()
    assert received(net.front_ends[0]) == [SleepDone(8)]


def test_prefix_hashes_are_the_same_in_every_process() -> None:
    import os
    import subprocess
    import sys

    imports = "from mvllm.kv_events.prefix_index import prefix_keys, root_key"
    code = f"{imports}; print(prefix_keys(range(200), 64, root_key([('cache_salt', 'salt')])))"
    names = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1 and names != {b""}
