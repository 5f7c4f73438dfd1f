#!/usr/bin/env python3
"""The lane `tpu`: the TPU platform on XLA's own CPU device, in an environment of its own, .venv-tpu.

    python3 ci/dev.py conform tpu    the conformance suite with one device and with two, and the parity of families
    python3 ci/dev.py test           the gate, with a smoke part of it

What stands between torch and XLA wants a torch of its own (ci/constraints/tpu.txt): nothing of this can run in .venv.
XLA compiles for the host as it does for a TPU, and the host's processor can pose as several devices. Whatever depends
on what XLA computes, on static shapes and on collectives is examined for real; what depends on the chip is not.

Where the environment cannot be made, for want of the network, a compiler, disk or this Python's wheels, the lane is NOT
RUN, with the reason, and ends with 77: neither passed nor failed. A test that fails in it fails the lane.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import stub_libraries
from environments import UNFINISHED, Environment, Stamp, StepFailed, Steps, only_one, pinned

ROOT = Path(__file__).resolve().parent.parent
LANE = Environment(ROOT, ROOT / ".venv-tpu")
CONSTRAINTS = ROOT / "ci" / "constraints" / "tpu.txt"
PLATFORM = ROOT / "platforms" / "tpu"
WAIVERS = PLATFORM / "waivers.toml"
REPORTS = ROOT / "build" / "lanes" / "tpu" / "reports"
LOGS = REPORTS.parent / "logs"
TOOLS = ("python", "mvllm", "pytest")
PARITY = (
    *(f"tests/conformance/models/test_{family}.py" for family in ("llama", "qwen3", "opt")),
    *("-k", "([llama-gqa] or [qwen3] or [opt]) and not preempted"),
)
"""One model of each: an engine's start is some twenty-five compilations. Preemption is among the platform's own tests,
with a cache of a few blocks: what these make first would be as large as the host's memory, and XLA writes all of it."""
NOT_RUN = 77
NUM_BYTES = 4 * 10**9  # of disk, while it is being made; 2.4e9 in the end
PATIENCE = 900.0  # seconds for making the environment
PATIENCE_OF_THE_GATE = 240.0  # its tests alone take long enough
A_LINE_EVERY = 60.0  # seconds
TIME_TO_END = 5.0  # seconds
NUM_PROGRAMS = 256
"""That XLA keeps. Each is dozens of mappings of memory on the host; at Linux's limit of 65,530 the process crashes."""
PIP: tuple[str | Path, ...] = (
    *(LANE.python, "-m", "pip", "install", "--quiet"),
    *("--progress-bar", "off", "--no-deps"),
)
NETWORK = ("--timeout", "20", "--retries", "2")


class Process(Protocol):
    """What subprocess.Popen has of use here."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[str], dict[str, str], Path], Process]
"""Starts a command of the environment with further variables, its output going to a file."""


class NotRun(Exception):
    """The lane cannot be run here; the message says why."""


# --------------------------------------------------------------------------------------------------------------- set-up


def wanted_stamp() -> Stamp:
    """What the environment is a function of."""
    fetched = [CONSTRAINTS, ROOT / "ci" / "stub_libraries.py"]
    return Stamp(LANE.hash_of([ROOT / "pyproject.toml", PLATFORM / "pyproject.toml", *fetched]), LANE.hash_of(fetched))


def why_not() -> str:
    """What this machine lacks for making the environment, as far as a look can tell; empty for nothing."""
    if not (PLATFORM / "pyproject.toml").is_file():
        return "there is no platforms/tpu in this repository"
    if sys.platform != "linux":
        return f"torch_xla has wheels for Linux only; this is {sys.platform}"
    if absent := stub_libraries.missing_tools():
        return f"this machine has no {' and no '.join(absent)}, which ci/stub_libraries.py needs"
    if (free := shutil.disk_usage(ROOT).free) < NUM_BYTES:
        return f"it takes {NUM_BYTES / 1e9:.0f} GB of disk to make its environment, and {free / 1e9:.1f} GB are free"
    return ""


def setup(patience: float = PATIENCE) -> None:
    """Makes .venv-tpu, or brings it up to date; does nothing (in milliseconds) when it is.

    What is fetched is fetched again only where the constraints changed.

    Args:
        patience: Seconds that this may take.

    Raises:
        NotRun: It could not be made.
    """
    with only_one():
        wanted = wanted_stamp() if (PLATFORM / "pyproject.toml").is_file() else UNFINISHED
        found = LANE.read_stamp() if LANE.has(TOOLS) else None
        if found == wanted != UNFINISHED:
            return
        if reason := why_not():
            raise NotRun(reason)
        started = time.monotonic()
        if found is not None and found.kernels == wanted.kernels:
            print(f"Bringing the environment in {LANE.folder} up to date", flush=True)
            attempt(lambda: install_ours(Steps(LANE, total=1, ends=started + patience)))
            LANE.write_stamp(wanted)
            return
        print(f"Making the environment in {LANE.folder} (2.4 GB, 1 GB to fetch; about two minutes)", flush=True)
        LANE.remove()
        LANE.write_stamp(UNFINISHED)
        attempt(lambda: install(Steps(LANE, total=5, ends=started + patience)))
        LANE.write_stamp(wanted)
        print(f"Environment ready after {time.monotonic() - started:.0f} s", flush=True)


def attempt(make: Callable[[], None]) -> None:
    """Calls `make`.

    Raises:
        NotRun: One of its steps failed.
    """
    try:
        make()
    except StepFailed as failure:
        raise NotRun(f"its environment could not be made:\n{failure}") from failure


def install(steps: Steps) -> None:
    """Makes the environment, from nothing."""
    steps.run(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", LANE.folder])
    # Nothing is resolved: torch asks for libraries of gigabytes that are not wanted, and the constraints name all else.
    # Nothing is compiled ahead: of torch's modules few are ever imported.
    pip = [*PIP, "--no-compile"]
    stack = [f"{name}=={pinned(name, CONSTRAINTS)}" for name in ("torch", "torch_xla")]
    steps.run(" and ".join(stack), [*pip, *NETWORK, *stack])
    [libraries] = LANE.folder.glob("lib/python*/site-packages/torch/lib")
    stubs = [LANE.python, ROOT / "ci" / "stub_libraries.py", libraries]
    steps.run("stubs of what torch loads and XLA does not call", stubs)
    steps.run("what these and mvllm require", [*pip, *NETWORK, "-r", CONSTRAINTS])
    install_ours(steps)


def install_ours(steps: Steps) -> None:
    """What is in this repository, in place."""
    steps.run("mvllm and mvllm-tpu", [*PIP, "--no-build-isolation", "-e", ROOT, "-e", PLATFORM])


# ------------------------------------------------------------------------------------------------------------ what runs


@dataclass(frozen=True)
class Part:
    """One command of the lane.

    Attributes:
        title: What it examines.
        command: Of the environment; its first word is a name in the environment's folder of commands.
        num_devices: What XLA's host poses as.
    """

    title: str
    command: tuple[str, ...]
    num_devices: int = 1


@dataclass(frozen=True)
class Running:
    """A part under way, or just ended.

    Attributes:
        log: What it has printed.
        began: Of time.monotonic.
    """

    part: Part
    process: Process
    log: Path
    began: float

    def progress(self) -> str:
        """How far it is, as pytest says at the end of each full line."""
        said = re.findall(r"\[ *(\d+)%\]", self.log.read_text(errors="replace"))
        minutes = (time.monotonic() - self.began) / 60
        return f"{self.part.title}: {said[-1] if said else 0}% after {minutes:.0f} min"

    def end(self) -> None:
        """Waits for one that was asked to end, and not for long."""
        try:
            self.process.wait(TIME_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def show(self) -> None:
        """Prints what it printed."""
        minutes = (time.monotonic() - self.began) / 60
        print(f"\ntpu: {self.part.title}, {minutes:.1f} min:", flush=True)
        print(self.log.read_text(errors="replace"), flush=True)


def begin(part: Part, start_command: Start) -> Running:
    """Starts a part on XLA's CPU device."""
    variables = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(part.num_devices),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "XLA_COMPILATION_CACHE_SIZE": str(NUM_PROGRAMS),
    }
    log = LOGS / f"{re.sub('[^a-z0-9]+', '-', part.title.lower())}.log"
    log.unlink(missing_ok=True)
    log.touch()
    return Running(part, start_command(part.command, variables, log), log, time.monotonic())


def whole(arguments: Sequence[str] = ()) -> list[Part]:
    """The lane's parts. With arguments for `mvllm conformance` it is that alone, with them."""
    parts = []
    for num_devices in (1, 2):
        named = f"{num_devices} {'device' if num_devices == 1 else 'devices'}"
        report = () if arguments else ("--report", str(REPORTS / f"conformance-{named.replace(' ', '-')}.json"))
        given = arguments if num_devices == 1 else with_a_report_of_its_own(arguments, f"-{named.replace(' ', '-')}")
        parts.append(Part(f"conformance, {named}", conformance(*report, *given), num_devices))
    if arguments:
        return parts
    return [
        *parts,
        Part("the platform's tests", tests("platforms/tpu/tests")),
        Part("parity of Llama, Qwen3 and OPT", tests("--mvllm-platform", "tpu", *PARITY)),
    ]


def with_a_report_of_its_own(arguments: Sequence[str], ending: str) -> list[str]:
    """The same arguments for a second run, which does not write where the first does."""

    def place(path: str) -> str:
        return str(Path(path).with_stem(Path(path).stem + ending))

    found, is_path = [], False
    for word in arguments:
        option, equals, path = word.partition("=")
        if is_path:
            word = place(word)
        elif option == "--report" and equals:
            word = f"{option}={place(path)}"
        is_path = word == "--report"
        found.append(word)
    return found


def smoke() -> list[Part]:
    """What the gate has time for."""
    return [
        Part(
            "conformance, thinned out, of few families",
            conformance("--quick", "--only", "PLG,PRB,CFG,DEV,MEM,KVL,ATT-01"),
        ),
        Part(
            "parity of a small Llama",
            tests(f"{PLATFORM}/tests/test_on_xlas_cpu_device.py", "-k", "transformers and llama"),
        ),
    ]


def conformance(*arguments: str) -> tuple[str, ...]:
    """The suite on the platform."""
    waivers = ("--waivers", str(WAIVERS)) if WAIVERS.is_file() and "--waivers" not in arguments else ()
    return ("mvllm", "conformance", "--platform", "tpu", *waivers, *arguments)


def tests(*arguments: str) -> tuple[str, ...]:
    """Tests of the repository: the only platform of this environment is the one that they examine."""
    return ("pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *arguments)


def start(command: Sequence[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a command of the environment that writes into `log`."""
    program = [str(LANE.bin / command[0]), *command[1:]]
    with log.open("wb") as output:
        return subprocess.Popen(
            program,
            cwd=ROOT,
            env=LANE.variables(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run(parts: Sequence[Part], patience: float = PATIENCE, start_command: Start = start) -> int:
    """Makes the environment and runs `parts`, all of them, whatever becomes of each.

    Each keeps about one core busy, so as many run at once as there are cores. What one prints is shown when it has
    ended; until then a line a minute says how far each is.

    Returns:
        0 if all passed, 1 if one failed, NOT_RUN if the environment could not be made.
    """
    try:
        setup(patience)
    except NotRun as reason:
        print(f"tpu: NOT RUN: {reason}", flush=True)
        return NOT_RUN
    for folder in (REPORTS, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    at_once = min(os.cpu_count() or 1, len(parts))
    print(f"\ntpu: {len(parts)} parts, {at_once} at a time; their output goes to {LOGS}", flush=True)
    waiting, running, failed = list(parts), list[Running](), list[str]()
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                part = waiting.pop(0)
                try:
                    running.append(begin(part, start_command))
                except OSError as error:
                    failed.append(f"{part.title} (could not be started: {error})")
            for each in list(running):
                if (status := each.process.poll()) is None:
                    continue
                running.remove(each)
                each.show()
                if status:
                    failed.append(f"{each.part.title} (exit status {status})")
            if running and time.monotonic() - told >= A_LINE_EVERY:
                told = time.monotonic()
                print(f"tpu: {'; '.join(each.progress() for each in running)}", flush=True)
            if running:
                time.sleep(0.2)
    finally:
        for each in running:  # whoever interrupts this wants none of them to go on
            each.process.terminate()
        for each in running:
            each.end()
    titles = "; ".join(part.title for part in parts)
    print(
        f"\ntpu: FAILED: {'; '.join(failed)}" if failed else f"\ntpu: passed on XLA's CPU device: {titles}", flush=True
    )
    return 1 if failed else 0
