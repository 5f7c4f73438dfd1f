"""Whatever is killed, hangs, or goes wrong, at whatever moment: the caller is told, and nothing is left behind."""

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

import psutil
import pytest

from tests.helpers.plugins import ROOT, fault_platform_path
from tests.helpers.processes import TAG, assert_nothing_left, named, new_tag, shared_memory_names, tagged, wait_until

PROGRAM = Path(__file__).with_name("multiproc_program.py")
SLOW = "slow@execute:rank=-1,seconds=0.2"
MIDDLE = {
    "start-up": "hang@init_device:rank=-1",
    "loading": "hang@load:rank=-1",
    "idle": "none",
    "mid-request": SLOW,
}
"""Phase -> the fault that holds the engine there."""
ACTIVITY = {"start-up": "init_device", "loading": "load_model", "idle": "idle", "mid-request": "execute_model of step"}


class Engine:
    """A running multiproc_program."""

    def __init__(self, checkpoint: Path, plugin_path: list[str], faults: str, settings: dict[str, object]) -> None:
        self.tag = new_tag()
        self.shared_memory_before = shared_memory_names()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*plugin_path, str(ROOT), *sys.path]),
            "FAULT_INJECTION": faults,
            TAG: self.tag,
        }
        given = {
            "model": str(checkpoint),
            "platform": "faulty",
            "tensor_parallel_size": 2,
            "kv_cache_memory_bytes": 1 << 22,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(given)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def reach(self, phase: str) -> None:
        """Returns when the engine is in the middle of `phase`."""
        if phase in ("idle", "mid-request"):
            self.expect("idle")
            if phase == "mid-request":
                self.go()
                self.expect("running")
                time.sleep(0.5)
        else:
            activity = ACTIVITY[phase]
            wait_until(lambda: named(self.tag, "Worker_TP1"), 30, "workers exist")
            # The stack of a worker would tell, too, but a fault that sleeps is where the time goes.
            wait_until(lambda: self._sleeping(), 30, f"workers hang in {activity}")

    def _sleeping(self) -> bool:
        """Both workers have their plugin loaded and use no processor."""
        workers = named(self.tag, "Worker_TP0") + named(self.tag, "Worker_TP1")
        before = [sum(worker.cpu_times()[:2]) for worker in workers]
        loaded = all("libtorch" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in workers)
        time.sleep(0.5)
        return loaded and before == [sum(worker.cpu_times()[:2]) for worker in workers]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def expect(self, phase: str, timeout: float = 60) -> dict[str, str]:
        """The next line that speaks of `phase`."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            facts = json.loads(line)
            if facts["phase"] == phase:
                return facts
        raise AssertionError(f"it never came to {phase}:\n{self.process.stderr.read()}")  # type: ignore[union-attr]

    def worker(self, name: str) -> psutil.Process:
        (process,) = named(self.tag, name)
        return process

    def assert_nothing_left(self) -> None:
        assert_nothing_left(self.tag, self.shared_memory_before)


StartEngine = Callable[..., Engine]


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[StartEngine]:
    plugin_path = fault_platform_path(tmp_path / "plugins")
    with ExitStack() as stack:

        def build(faults: str = "none", **settings: object) -> Engine:
            engine = Engine(checkpoint, plugin_path, faults, settings)

            def clean_up() -> None:
                for process in [engine.process, *tagged(engine.tag)]:
                    process.kill()
                engine.process.communicate()

            stack.callback(clean_up)
            return engine

        yield build


@pytest.mark.parametrize("phase", MIDDLE)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_named_and_nothing_is_left(start: StartEngine, phase: str, rank: int) -> None:
    engine = start(MIDDLE[phase])
    engine.reach(phase)
    pid = engine.worker(f"Worker_TP{rank}").pid
    os.kill(pid, signal.SIGKILL)
    if phase == "idle":
        wait_until(lambda: len(tagged(engine.tag)) == 1, 5, "the other worker is ended, the caller is not")
        engine.go()
    killed = time.monotonic()
    told = engine.expect("failed")
    assert time.monotonic() - killed < 5
    assert re.search(rf"Worker_TP{rank} \(rank {rank}, pid {pid}\) was killed by SIGKILL.*memory", told["message"])
    assert ACTIVITY[phase] in told["message"]
    assert engine.process.wait(5) == 1
    engine.assert_nothing_left()


@pytest.mark.parametrize("phase", MIDDLE)
def test_killing_the_caller_leaves_nothing(start: StartEngine, phase: str) -> None:
    engine = start(MIDDLE[phase])
    engine.reach(phase)
    assert len(tagged(engine.tag)) == 3
    engine.process.kill()
    engine.process.wait()
    engine.assert_nothing_left()


def test_killing_the_caller_while_its_workers_are_being_started_leaves_nothing(start: StartEngine) -> None:
    engine = start()
    wait_until(lambda: len(tagged(engine.tag)) > 1, 30, "a worker exists")
    engine.process.kill()
    engine.process.wait()
    engine.assert_nothing_left()


@pytest.mark.parametrize("phase", MIDDLE)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_everything_soon(start: StartEngine, phase: str, number: signal.Signals) -> None:
    engine = start(MIDDLE[phase])
    engine.reach(phase)
    sent = time.monotonic()
    engine.process.send_signal(number)
    engine.process.wait(10)
    wait_until(lambda: not tagged(engine.tag), 5, "workers are gone")
    assert time.monotonic() - sent < 5
    engine.assert_nothing_left()


@pytest.mark.parametrize(("phase", "activity"), [("init_device", "init_device"), ("load", "load_model")])
def test_a_worker_that_fails_to_start_gives_the_caller_its_own_error(
    start: StartEngine, phase: str, activity: str
) -> None:
    engine = start(f"raise@{phase}:rank=1")
    told = engine.expect("failed")
    assert re.search(
        rf"Worker_TP1 \(rank 1, pid \d+\) failed in {activity}: .*InjectedFault: injected into {phase}", told["message"]
    )
    assert engine.process.wait(5) == 1
    engine.assert_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_raises_in_a_step_ends_the_engine_with_its_error(start: StartEngine, rank: int) -> None:
    engine = start(f"raise@execute:rank={rank},step=3")
    engine.reach("idle")
    engine.go()
    told = engine.expect("failed")
    assert told["kind"] == "EngineDeadError" and told["cause"] == "WorkerError"
    assert f"Worker_TP{rank} (rank {rank}" in told["message"]
    assert "execute_model of step 3" in told["message"] and "InjectedFault" in told["message"]
    assert engine.process.wait(5) == 1
    engine.assert_nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_exits_in_a_step_is_named_with_its_status(start: StartEngine, rank: int) -> None:
    engine = start(f"exit@execute:rank={rank},step=3,status=7")
    engine.reach("idle")
    engine.go()
    told = engine.expect("failed")
    assert told["cause"] == "WorkerDiedError"
    assert re.search(rf"Worker_TP{rank} .*exited with status 7 during execute_model of step 3", told["message"])
    engine.process.wait(5)
    engine.assert_nothing_left()


@pytest.mark.parametrize("kind", ["hang", "spin"])
def test_a_step_that_hangs_ends_with_the_rank_and_its_stack(start: StartEngine, kind: str) -> None:
    engine = start(f"{kind}@execute:rank=1,step=3", step_timeout=3)
    engine.reach("idle")
    engine.go()
    told = engine.expect("failed")
    assert told["cause"] == "WorkerStuckError"
    assert "Worker_TP1 (rank 1" in told["message"] and "execute_model of step 3" in told["message"]
    assert re.search(r"faults\.py.*in happen", told["message"])
    engine.process.wait(5)
    engine.assert_nothing_left()


def test_a_step_of_nan_ends_its_requests_and_not_the_engine(start: StartEngine) -> None:
    engine = start("nan@execute:rank=-1,step=3")
    engine.reach("idle")
    engine.go()
    told = engine.expect("done")
    assert set(told["reasons"]) == {"error"}
    assert engine.process.wait(10) == 0
    engine.assert_nothing_left()


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_tokens_are_those_of_one_process(start: StartEngine, sizes: tuple[int, int]) -> None:
    alone = start(tensor_parallel_size=1, distributed_executor_backend="uni")
    many = start(
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        distributed_executor_backend="mp",
        max_num_seqs=2,
        max_num_batched_tokens=4,
    )
    for engine in (alone, many):
        engine.go()
    assert many.expect("done")["tokens"] == alone.expect("done")["tokens"]
