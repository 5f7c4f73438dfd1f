"""Processes killed or interrupted in every phase: the caller gets an error, and no process or shared memory is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.plugins import scripted_platform_path
from tests.helpers.processes import (
    TAG,
    assert_nothing_left,
    is_reading_stdin,
    is_sleeping,
    new_tag,
    shared_memory_names,
    tagged_processes,
    wait_until,
    worker_processes,
)

PROGRAM = Path(__file__).with_name("multiproc_program.py")
PHASES = {"start-up": "hang-starting", "loading": "hang-loading", "idle": "slow", "mid-request": "slow"}
"""Phase -> the mode of the scripted worker that holds the engine there."""
SOME = [pytest.param(phase, marks=pytest.mark.exhaustive if phase in ("loading", "idle") else ()) for phase in PHASES]
"""The exhaustive tests have all phases."""
ACTIVITY = {
    "start-up": "importing the worker",
    "loading": "load_model",
    "idle": "idle",
    "mid-request": "execute_model of step|idle",  # on a busy machine the signal may arrive between two steps
}
START_SECONDS = 120
"""Time for processes to start on a machine that is busy with other tests."""
SOON = 60
"""Seconds for what takes one on a machine that is not busy, and minutes by a time limit."""


class Engine:
    """A running multiproc_program."""

    def __init__(self, plugin_path: list[str], mode: str) -> None:
        self.tag = new_tag()
        self.shared_memory_before = shared_memory_names()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*plugin_path, *sys.path]),
            "SCRIPTED_WORKER": mode,
            TAG: self.tag,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def reach(self, phase: str) -> None:
        """Returns when the engine is in `phase`."""
        if phase in ("idle", "mid-request"):
            self.expect("idle")
            # A signal just before Python enters the read would be handled only after the next line.
            wait_until(lambda: is_reading_stdin(self.process.pid), START_SECONDS, "it waits for its next line")
            time.sleep(0.3)  # a worker says that it is idle just after it has answered
        else:
            wait_until(self._hangs, START_SECONDS, lambda: f"workers hang in {phase}; it has {self._state()}")
        if phase == "mid-request":
            self.go()
            self.expect("running")
            time.sleep(0.3)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def expect(self, phase: str) -> dict[str, str]:
        """The next line about `phase`."""
        assert self.process.stdout is not None and self.process.stderr is not None
        while line := self.process.stdout.readline():
            facts = json.loads(line)
            if facts["phase"] == phase:
                return facts
        raise AssertionError(f"it never came to {phase}:\n{self.process.stderr.read()}")

    def worker(self, rank: int) -> int:
        (process,) = worker_processes(self.tag, f"Worker_TP{rank}")
        return process.pid

    def assert_nothing_left(self) -> None:
        assert_nothing_left(self.tag, self.shared_memory_before)

    def _state(self) -> str:
        """What there is, for a message."""
        if self.process.poll() is not None:
            return f"ended with {self.process.returncode}: {self.process.communicate()}"
        workers = [worker for rank in range(2) for worker in worker_processes(self.tag, f"Worker_TP{rank}")]
        return f"workers {[(worker.pid, is_sleeping(worker.pid)) for worker in workers]}"

    def _hangs(self) -> bool:
        """Whether both workers are in time.sleep."""
        workers = worker_processes(self.tag, "Worker_TP0") + worker_processes(self.tag, "Worker_TP1")
        return len(workers) == 2 and all(is_sleeping(worker.pid) for worker in workers)


StartEngine = Callable[[str], Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartEngine]:
    plugin_path = scripted_platform_path(tmp_path / "plugins")
    with ExitStack() as stack:

        def build(mode: str) -> Engine:
            engine = Engine(plugin_path, mode)

            def clean_up() -> None:
                for process in [engine.process, *tagged_processes(engine.tag)]:
                    process.kill()
                engine.process.communicate()

            stack.callback(clean_up)
            return engine

        yield build


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_worker_is_named_and_no_process_is_left(start: StartEngine, phase: str, rank: int) -> None:
    engine = start(PHASES[phase])
    engine.reach(phase)
    pid = engine.worker(rank)
    os.kill(pid, signal.SIGKILL)
    if phase == "idle":
        wait_until(lambda: len(tagged_processes(engine.tag)) == 1, 120, "the other worker is ended, the caller is not")
        engine.go()
    killed = time.monotonic()
    failure = engine.expect("failed")
    assert time.monotonic() - killed < SOON
    assert re.search(rf"Worker_TP{rank} \(rank {rank}, pid {pid}\) was killed by SIGKILL.*memory", failure["message"])
    assert re.search(ACTIVITY[phase], failure["message"])
    assert engine.process.wait(120) == 1
    engine.assert_nothing_left()


@pytest.mark.parametrize("phase", SOME)
def test_killing_the_caller_leaves_nothing(start: StartEngine, phase: str) -> None:
    engine = start(PHASES[phase])
    engine.reach(phase)
    assert len(tagged_processes(engine.tag)) == 3
    engine.process.kill()
    engine.process.wait()
    engine.assert_nothing_left()


@pytest.mark.parametrize(
    "delay", [0.0, 0.05, *(pytest.param(delay, marks=pytest.mark.exhaustive) for delay in (0.02, 0.1, 0.2))]
)
def test_killing_the_caller_while_workers_are_being_started_leaves_nothing(start: StartEngine, delay: float) -> None:
    engine = start("slow")
    wait_until(lambda: len(tagged_processes(engine.tag)) > 1, START_SECONDS, "a worker exists")
    time.sleep(delay)
    engine.process.kill()
    engine.process.wait()
    engine.assert_nothing_left()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("start-up", signal.SIGINT),
        ("mid-request", signal.SIGTERM),
        *(pytest.param(phase, signal.SIGINT, marks=pytest.mark.exhaustive) for phase in PHASES if phase != "start-up"),
        *(
            pytest.param(phase, signal.SIGTERM, marks=pytest.mark.exhaustive)
            for phase in PHASES
            if phase != "mid-request"
        ),
    ],
)
def test_ctrl_c_and_sigterm_end_everything_soon(start: StartEngine, phase: str, number: signal.Signals) -> None:
    engine = start(PHASES[phase])
    engine.reach(phase)
    sent = time.monotonic()
    engine.process.send_signal(number)
    assert engine.process.wait(120) == -number
    wait_until(lambda: not tagged_processes(engine.tag), 120, "workers are gone")
    assert time.monotonic() - sent < SOON
    engine.assert_nothing_left()


def test_a_second_ctrl_c_while_workers_are_being_ended_leaves_nothing(start: StartEngine) -> None:
    engine = start("hang-loading")
    engine.reach("loading")
    for _ in range(2):
        engine.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    engine.process.wait(120)
    engine.assert_nothing_left()


def test_ctrl_c_in_a_terminal_reaches_the_caller_only(start: StartEngine) -> None:
    engine = start("slow")
    engine.reach("idle")
    groups = {os.getpgid(engine.worker(rank)) for rank in (0, 1)}
    assert os.getpgid(engine.process.pid) not in groups
    for rank in (0, 1):
        os.kill(engine.worker(rank), signal.SIGINT)  # workers ignore it
    time.sleep(0.3)
    assert len(tagged_processes(engine.tag)) == 3
