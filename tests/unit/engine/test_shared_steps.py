"""FairLock and SharedSteps: the order in which threads get an engine, and which of them runs its steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mvllm.engine.fair_lock import FairLock
from mvllm.engine.shared_steps import SharedSteps
from mvllm.errors import RequestError
from tests.helpers.threads import SECONDS, run_in_threads


@dataclass
class Output:
    request_id: str
    finished: bool


def nothing() -> None:
    pass


class Engine:
    """Each step gives every request one output; a request has the number of outputs that it asks for."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.num_steps = 0
        self.drivers: list[int] = []
        self.others: list[Output] = []
        self.is_paused = False
        self.steps = SharedSteps(self.step, lambda: bool(self.left) and not self.is_paused)

    def step(self) -> None:
        self.num_steps += 1
        self.drivers.append(threading.get_ident())
        self.left = {name: count - 1 for name, count in self.left.items() if count}
        outputs = [Output(name, not count) for name, count in self.left.items()]
        self.left = {name: count for name, count in self.left.items() if count}
        self.others += self.steps.deliver(outputs)  # type: ignore[arg-type, arg-type]

    def run(self, before_step: Callable[[], None] = nothing, **requests: int) -> list[str]:
        """The ids of the outputs of a call."""
        with self.steps.lock:
            self.left |= requests
            caller = self.steps.add(list(requests))
        found: list[str] = []
        try:
            while caller.unfinished:
                found += [output.request_id for output in self.steps.next_outputs(caller, before_step)]
        finally:
            with self.steps.lock:
                self.left = {name: count for name, count in self.left.items() if name not in requests}
                self.steps.remove(caller)
                self.steps.resume()
        return found

    def wait_for(self, count: int) -> None:
        while len(self.left) < count:
            time.sleep(0.001)


def wait_for_queue(lock: FairLock, count: int) -> None:
    while len(lock._queue) < count:
        time.sleep(0.001)


def test_threads_get_the_lock_in_the_order_in_which_they_asked() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock, lock:  # reentrant
            order.append(number)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
    with lock:
        for i, thread in enumerate(threads):
            thread.start()
            wait_for_queue(lock, i + 1)
    with lock:  # taken again at once, and yet after those who waited
        order.append(-1)
    for thread in threads:
        thread.join(SECONDS)
    assert order == [0, 1, 2, 3, -1]


def test_ctrl_c_while_waiting_for_the_lock_leaves_the_queue() -> None:
    lock, release = FairLock(), threading.Event()

    def hold() -> None:
        with lock:
            release.wait(SECONDS)

    def interrupt() -> None:
        wait_for_queue(lock, 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    holder = threading.Thread(target=hold)
    holder.start()
    while lock._owner is None:
        time.sleep(0.001)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), lock:
        pytest.fail("the lock is held")
    assert not lock._queue
    release.set()
    with lock:
        holder.join(SECONDS)


def test_one_thread_runs_the_steps_of_all() -> None:
    engine = Engine()
    first = threading.Thread(target=lambda: engine.run(a=50))
    engine.is_paused = True
    first.start()
    others = [threading.Thread(target=lambda i=i: engine.run(**{f"b{i}": 50})) for i in range(2)]
    for thread in others:
        thread.start()
    engine.wait_for(3)
    with engine.steps.lock:
        engine.is_paused = False
        engine.steps.resume()
    for thread in (first, *others):
        thread.join(SECONDS)
    assert engine.num_steps < 3 * 50 and not engine.others and not engine.steps.is_driven


def test_every_call_gets_its_own_outputs() -> None:
    engine = Engine()
    work = [lambda i=i: engine.run(**{f"{i}-{j}": j + 1 for j in range(5)}) for i in range(6)]
    for i, found in enumerate(run_in_threads(*work)):
        assert sorted(found) == sorted(f"{i}-{j}" for j in range(5) for _ in range(j + 1))
    assert not engine.others


def test_a_call_that_ends_with_an_error_lets_another_one_drive() -> None:
    engine, has_ended = Engine(), threading.Event()

    def fail() -> None:
        if "b" in engine.left or has_ended.is_set():  # the other call may have driven all its steps
            raise ArithmeticError

    def drive() -> None:
        engine.run(fail, a=10**9)

    def follow() -> list[str]:
        engine.wait_for(1)
        try:
            return engine.run(b=20)
        finally:
            has_ended.set()

    error, found = run_in_threads(drive, follow)
    assert isinstance(error, ArithmeticError) and found == ["b"] * 20


def test_calls_without_work_sleep_until_there_is_some() -> None:
    engine = Engine()
    engine.is_paused = True

    def resume() -> None:
        engine.wait_for(2)
        time.sleep(0.02)
        assert engine.num_steps == 0
        with engine.steps.lock:
            engine.is_paused = False
            engine.steps.resume()

    assert run_in_threads(lambda: engine.run(a=2), lambda: engine.run(b=3), resume) == [["a"] * 2, ["b"] * 3, None]


def test_dropped_requests_end_their_call_with_the_error() -> None:
    engine = Engine()
    engine.is_paused = True

    def drop() -> None:
        engine.wait_for(2)
        with engine.steps.lock:
            del engine.left["a"]
            engine.steps.fail(["a"], RequestError("dropped"))
            engine.is_paused = False
            engine.steps.resume()

    error, found, _ = run_in_threads(lambda: engine.run(a=1), lambda: engine.run(b=1), drop)
    assert isinstance(error, RequestError) and found == ["b"]


def test_outputs_of_other_requests_are_returned() -> None:
    engine = Engine()
    engine.left["hers"] = 5
    assert engine.run(mine=3) == ["mine"] * 3
    assert [output.request_id for output in engine.others] == ["hers"] * 3
