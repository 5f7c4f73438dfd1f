"""A real model on two workers behind an engine-core process: whenever one of its processes is killed or interrupted,
the caller gets an error that names the process and its activity, and no process is left."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.plugins import fault_platform_path
from tests.helpers.processes import (
    assert_nothing_left,
    is_reading_stdin,
    is_sleeping,
    new_tag,
    shared_memory_names,
    tagged_processes,
    wait_until,
    worker_processes,
)

PROGRAM = Path(__file__).with_name("llm_program.py")
PHASES = {
    "start-up": "none",
    "loading": "hang@load:rank=-1",
    "idle": "none",
    "mid-request": "hang@execute:rank=-1,step=2",
}
"""Phase -> the fault that holds the workers in it."""
WORKER_ACTIVITY = {
    "start-up": "starting the interpreter|loading the platform faulty|importing the worker|init_device",
    "loading": "load_model",
    "idle": "idle",
    "mid-request": "execute_model of step 2",
}
CORE_ACTIVITY = {
    "start-up": "starting the interpreter|loading the platform faulty|importing the engine core",
    "loading": "load model",
    "idle": "idle",
    "mid-request": "execution of step 2",
}
SETTINGS = {
    "platform": "faulty",
    "tensor_parallel_size": 2,
    "engine_core_process": True,
    "kv_cache_memory_bytes": 1 << 22,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}


class Forker:
    """A running llm_program, which forks front ends."""

    def __init__(self, plugin_path: list[str], errors: Path) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*plugin_path, *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("wb"),
        )
        self.expect("waiting")

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def expect(self, phase: str) -> dict[str, Any]:
        """The next line about `phase`."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            facts = json.loads(line)
            if facts["phase"] == phase:
                return facts
            assert facts["phase"] not in ("failed", "ended"), f"it never came to {phase}: {facts}"
        raise AssertionError(f"it never came to {phase}:\n{self.errors.read_text()}")


NOTICED_SECONDS, ENDED_SECONDS = 60, 60
"""Both take a second; on a busy machine, more. Without the tested way, nothing would happen for minutes."""


class FrontEnd:
    """One front end with all processes that it starts."""

    def __init__(self, forker: Forker, model: Path, phase: str) -> None:
        self.tag = new_tag()
        self._forker = forker
        self._shared_memory_before = shared_memory_names()
        forker.say(json.dumps({"model": str(model), "tag": self.tag, "faults": PHASES[phase], "settings": SETTINGS}))
        self.pid = forker.expect("starting")["pid"]
        self._ended: int | None = None
        self.expect = forker.expect

    def reach(self, phase: str, needed: str) -> None:
        """Returns when the engine is in the middle of `phase`; in start-up, when the process `needed` exists."""
        if phase == "start-up":
            wait_until(lambda: worker_processes(self.tag, needed), 180, f"{needed} exists")
            return
        if phase != "loading":
            self.expect("idle")
            # A signal just before Python enters the read would be handled only after the next line.
            wait_until(lambda: is_reading_stdin(self.pid), 180, "it waits for its next line")
        if phase == "mid-request":
            self.go()
            self.expect("running")
        if phase != "idle":
            wait_until(self._hangs, 180, f"workers hang in {phase}")

    def go(self) -> None:
        self._forker.say("go\n")

    def pid_of(self, name: str) -> int:
        (process,) = worker_processes(self.tag, name)
        return process.pid

    def wait(self) -> int:
        """Its exit status."""
        if self._ended is None:
            self._ended = self.expect("ended")["status"]
        return self._ended

    def assert_nothing_left(self) -> None:
        assert_nothing_left(self.tag, self._shared_memory_before)

    def clean_up(self) -> None:
        if self._ended is None and self._forker.process.poll() is None:
            psutil.Process(self.pid).kill()
            try:
                self.wait()
            except AssertionError:
                self._forker.process.kill()  # the forker cannot be used again

    def _hangs(self) -> bool:
        workers = worker_processes(self.tag, "Worker_TP0", "Worker_TP1")
        return len(workers) == 2 and all(is_sleeping(worker.pid) for worker in workers)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    folder = tmp_path_factory.mktemp("killed")
    forker = Forker(fault_platform_path(folder / "plugins"), folder / "stderr")
    yield forker
    forker.process.kill()
    forker.process.communicate()


Start = Callable[[str], FrontEnd]


@pytest.fixture
def start(forker: Forker, checkpoint: Path) -> Iterator[Start]:
    started: list[FrontEnd] = []

    def build(phase: str) -> FrontEnd:
        started.append(FrontEnd(forker, checkpoint, phase))
        return started[-1]

    yield build
    for front_end in started:
        front_end.clean_up()
        for process in tagged_processes(front_end.tag):
            process.kill()


def mark_exhaustive(ids: Iterable[tuple[object, ...]], kept: Container[tuple[object, ...]]) -> list[Any]:
    """All cases; those not in `kept` run only with the exhaustive tests.

    test_multiproc_leftovers has every phase and rank, and every phase and signal, with workers that start quickly.
    """
    return [pytest.param(*one, marks=() if one in kept else pytest.mark.exhaustive) for one in ids]


VICTIMS = ("EngineCore", "Worker_TP0", "Worker_TP1")
KILLED = {
    ("mid-request", "EngineCore"),
    ("idle", "Worker_TP0"),
}
SIGNALLED = {(signal.SIGTERM, "loading")}


@pytest.mark.parametrize(("phase", "victim"), mark_exhaustive(itertools.product(PHASES, VICTIMS), KILLED))
def test_a_killed_process_is_named_to_the_caller_and_nothing_is_left(start: Start, phase: str, victim: str) -> None:
    front_end = start(phase)
    front_end.reach(phase, needed=victim)
    pid = front_end.pid_of(victim)
    os.kill(pid, signal.SIGKILL)
    if phase == "idle":  # all processes that it started end by themselves; the front end continues
        front_end.assert_nothing_left()
        front_end.go()
    killed = time.monotonic()
    told = front_end.expect("failed")
    assert time.monotonic() - killed < NOTICED_SECONDS
    if victim == "EngineCore":
        who, activity = rf"EngineCore \(pid {pid}\)", CORE_ACTIVITY[phase]
        assert told["kind"] == "EngineDeadError"
    else:
        rank = victim[-1]
        who, activity = rf"{victim} \(rank {rank}, pid {pid}\)", WORKER_ACTIVITY[phase]
        assert "WorkerDiedError" in (told["kind"], told["cause"])
    assert re.search(rf"{who} was killed by SIGKILL \(signal 9\).*(during|while it was) ({activity})", told["message"])
    assert front_end.wait() == 1
    front_end.assert_nothing_left()


@pytest.mark.parametrize(
    "phase",
    [pytest.param(phase, marks=() if phase == "mid-request" else pytest.mark.exhaustive) for phase in PHASES],
)
def test_killing_the_front_end_leaves_no_process(start: Start, phase: str) -> None:
    front_end = start(phase)
    front_end.reach(phase, needed="Worker_TP0")
    assert worker_processes(front_end.tag, "EngineCore")
    os.kill(front_end.pid, signal.SIGKILL)
    front_end.assert_nothing_left()
    assert front_end.wait() == -signal.SIGKILL


def test_killing_the_front_end_before_its_core_has_workers_leaves_no_process(start: Start) -> None:
    front_end = start("start-up")
    front_end.reach("start-up", needed="EngineCore")
    os.kill(front_end.pid, signal.SIGKILL)
    front_end.assert_nothing_left()
    assert front_end.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "phase"), mark_exhaustive(itertools.product((signal.SIGINT, signal.SIGTERM), PHASES), SIGNALLED)
)
def test_ctrl_c_and_sigterm_end_everything_soon(start: Start, phase: str, number: signal.Signals) -> None:
    front_end = start(phase)
    front_end.reach(phase, needed="EngineCore")
    sent = time.monotonic()
    os.kill(front_end.pid, number)
    assert front_end.wait() == -number
    wait_until(lambda: not tagged_processes(front_end.tag), 120, "everything is gone")
    assert time.monotonic() - sent < ENDED_SECONDS
    front_end.assert_nothing_left()


def test_every_process_has_a_title(start: Start, forker: Forker) -> None:
    front_end = start("idle")
    front_end.reach("idle", needed="")
    core = psutil.Process(front_end.pid_of("EngineCore"))
    assert core.ppid() == front_end.pid
    assert {core.pid} == {psutil.Process(front_end.pid_of(f"Worker_TP{rank}")).ppid() for rank in (0, 1)}
    assert "EngineCore" in (Path(f"/proc/{core.pid}/comm").read_text().strip() + " ".join(core.cmdline()))
    assert f"(EngineCore pid={core.pid}) INFO" in forker.errors.read_text()
    os.kill(core.pid, signal.SIGINT)  # the front end handles Ctrl-C
    front_end.go()
    assert [len(tokens) for tokens in front_end.expect("done")["tokens"]] == [12] * 4
    assert front_end.wait() == 0
    front_end.assert_nothing_left()
