#!/usr/bin/env python3
"""The lane `tpu`: tests the TPU platform on XLA's CPU device, in the separate environment .venv-tpu.

    python3 ci/dev.py conform tpu    the conformance suite with one device and with two, and the parity of families
    python3 ci/dev.py test           the gate, with a smoke part of it

torch_xla requires another torch (ci/constraints/tpu.txt), so the lane cannot run in .venv. XLA compiles for the CPU as
it does for a TPU, and the CPU can act as several devices. The lane covers XLA's results, static shapes and collectives;
it does not cover the hardware.

If the environment cannot be created (no network, compiler, disk space or wheels for this Python), the lane is NOT RUN,
prints the reason, and exits with 77: neither passed nor failed. A failing test fails the lane.
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
GGUF = ROOT / "plugins" / "gguf"
PARSERS = ROOT / "plugins" / "parsers"
COMMANDS = ROOT / "plugins" / "tools"
TRANSFORMERS = ROOT / "plugins" / "transformers-backend"
SUITE = ROOT / "plugins" / "conformance"
WAIVERS = PLATFORM / "waivers.toml"
REPORTS = ROOT / "build" / "lanes" / "tpu" / "reports"
LOGS = REPORTS.parent / "logs"
TOOLS = ("python", "mvllm", "pytest")
PARITY = (
    *(f"tests/conformance/models/test_{family}.py" for family in ("llama", "qwen3", "opt")),
    *("-k", "([llama-gqa] or [qwen3] or [opt]) and not preempted"),
)
"""One model of each family, since starting an engine takes about 25 compilations. The platform's own tests cover
preemption, with a small KV cache: these tests would allocate one of the size of the host memory, which XLA writes."""
NOT_RUN = 77
NUM_BYTES = 4 * 10**9  # of disk during the creation; 2.4e9 in the end
SETUP_SECONDS = 900.0  # limit for creating the environment
GATE_SETUP_SECONDS = 240.0  # the same limit in the gate
SECONDS_BETWEEN_LINES = 60.0
SECONDS_TO_TERMINATE = 5.0
XLA_FLAGS = "--xla_backend_optimization_level=0"
"""Flags of XLA's CPU device: LLVM emits machine code without optimizing it, which takes a ninth of the time for a
graph of three layers. The lane compiles far more than it computes."""
NUM_PROGRAMS = 256
"""Size of XLA's program cache. A program uses dozens of memory mappings; the limit of Linux is 65,530."""
PIP: tuple[str | Path, ...] = (
    *(LANE.python, "-m", "pip", "install", "--quiet"),
    *("--progress-bar", "off", "--no-deps"),
)
NETWORK = ("--timeout", "20", "--retries", "2")


class Process(Protocol):
    """The used methods of subprocess.Popen."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[Sequence[str], dict[str, str], Path], Process]
"""Starts a command of the environment with additional variables; its output goes to a file."""


class NotRun(Exception):
    """The lane cannot run here; the message has the reason."""


# --------------------------------------------------------------------------------------------------------------- set-up


def wanted_stamp() -> Stamp:
    """Hashes of the environment's inputs."""
    fetched = [CONSTRAINTS, ROOT / "ci" / "stub_libraries.py"]
    ours = [folder / "pyproject.toml" for folder in (ROOT, PLATFORM, SUITE)]
    return Stamp(LANE.hash_of([*ours, *fetched]), LANE.hash_of(fetched))


def why_not() -> str:
    """Why the environment cannot be created on this machine; empty if nothing is missing."""
    if not (PLATFORM / "pyproject.toml").is_file():
        return "there is no platforms/tpu in this repository"
    if sys.platform != "linux":
        return f"torch_xla has wheels for Linux only; this is {sys.platform}"
    if absent := stub_libraries.missing_tools():
        return f"this machine has no {' and no '.join(absent)}, which ci/stub_libraries.py needs"
    if (free := shutil.disk_usage(ROOT).free) < NUM_BYTES:
        return f"it takes {NUM_BYTES / 1e9:.0f} GB of disk to make its environment, and {free / 1e9:.1f} GB are free"
    return ""


def setup(seconds: float = SETUP_SECONDS) -> None:
    """Creates or updates .venv-tpu; returns within milliseconds if it is up to date.

    Downloads are repeated only if the constraints changed.

    Args:
        seconds: Time limit.

    Raises:
        NotRun: The environment could not be created.
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
            print(f"Updating the environment in {LANE.folder}", flush=True)
            attempt(lambda: install_ours(Steps(LANE, total=1, ends=started + seconds)))
            LANE.write_stamp(wanted)
            return
        print(f"Creating the environment in {LANE.folder} (2.4 GB, 1 GB to download; about two minutes)", flush=True)
        LANE.remove()
        LANE.write_stamp(UNFINISHED)
        attempt(lambda: install(Steps(LANE, total=6, ends=started + seconds)))
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
    """Creates the environment."""
    steps.run(f"virtual environment, Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", LANE.folder])
    # --no-deps: torch requires gigabytes of unused libraries, and the constraints name everything else.
    # --no-compile: few of torch's modules are ever imported.
    pip = [*PIP, "--no-compile"]
    stack = [f"{name}=={pinned(name, CONSTRAINTS)}" for name in ("torch", "torch_xla")]
    steps.run(" and ".join(stack), [*pip, *NETWORK, *stack])
    [libraries] = LANE.folder.glob("lib/python*/site-packages/torch/lib")
    stubs = [LANE.python, ROOT / "ci" / "stub_libraries.py", libraries]
    steps.run("stubs of unused libraries", stubs)
    steps.run("requirements of these and of mvllm", [*pip, *NETWORK, "-r", CONSTRAINTS])
    install_ours(steps)
    # One process compiles what all others would compile at the same time.
    imported = (
        "torch_xla.core.xla_model",
        "transformers.models.llama.modeling_llama",
        "pytest",
        "mvllm_conformance.run",
    )
    steps.run("imported modules compiled", [LANE.python, "-c", f"import {', '.join(imported)}"])


def install_ours(steps: Steps) -> None:
    """Installs the packages of this repository as editable."""
    packages = [
        argument
        for folder in (ROOT, GGUF, PARSERS, COMMANDS, TRANSFORMERS, SUITE, PLATFORM)
        for argument in ("-e", folder)
    ]
    steps.run(
        "mvllm, its conformance suite, -gguf, -parsers, -tools, -transformers-backend and -tpu",
        [*PIP, "--no-build-isolation", *packages],
    )


# ---------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Part:
    """One command of the lane.

    Attributes:
        title: Its title.
        command: The command; its first word is a command of the environment.
        num_devices: Number of devices as which the CPU acts.
    """

    title: str
    command: tuple[str, ...]
    num_devices: int = 1


@dataclass(frozen=True)
class Running:
    """A running or finished part.

    Attributes:
        log: File with its output.
        began: Start time, of time.monotonic.
    """

    part: Part
    process: Process
    log: Path
    began: float

    def progress(self) -> str:
        """Title, percentage and minutes. pytest prints the percentage at the end of each line."""
        percentages = re.findall(r"\[ *(\d+)%\]", self.log.read_text(errors="replace"))
        minutes = (time.monotonic() - self.began) / 60
        return f"{self.part.title}: {percentages[-1] if percentages else 0}% after {minutes:.0f} min"

    def end(self) -> None:
        """Waits for a terminated process, and kills it after SECONDS_TO_TERMINATE."""
        try:
            self.process.wait(SECONDS_TO_TERMINATE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def show(self) -> None:
        """Prints the output."""
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
        "PYTHONFAULTHANDLER": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip(),
    }
    log = LOGS / f"{re.sub('[^a-z0-9]+', '-', part.title.lower())}.log"
    log.unlink(missing_ok=True)
    log.touch()
    return Running(part, start_command(part.command, variables, log), log, time.monotonic())


def whole(arguments: Sequence[str] = ()) -> list[Part]:
    """All parts of the lane; with arguments only `mvllm conformance`, with these arguments."""
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
        Part("parity of Llama, Qwen3 and OPT", tests(*PARITY)),
    ]


def with_a_report_of_its_own(arguments: Sequence[str], ending: str) -> list[str]:
    """The arguments with another path of the report, for a second run."""

    def with_ending(path: str) -> str:
        return str(Path(path).with_stem(Path(path).stem + ending))

    found, is_path = [], False
    for word in arguments:
        option, equals, path = word.partition("=")
        if is_path:
            word = with_ending(word)
        elif option == "--report" and equals:
            word = f"{option}={with_ending(path)}"
        is_path = word == "--report"
        found.append(word)
    return found


SMOKE_CLAUSES = (
    *("PLG", "PRB", "CFG", "DEV-02", "DEV-03", "DEV-04", "DEV-05", "DEV-06", "DEV-07", "DEV-08"),
    *("MEM-01", "MEM-02", "MEM-03", "MEM-04", "KVL-01", "KVL-02", "KVL-03", "KVL-04", "ATT-01"),
)
"""Families and clauses of the suite that run in the gate: those that start no other process."""


def smoke() -> list[Part]:
    """The parts that run in the gate."""
    return [
        Part("conformance, some clauses, quick", conformance("--quick", "--only", ",".join(SMOKE_CLAUSES))),
        Part(
            "parity of a small Llama",
            tests(f"{PLATFORM}/tests/test_on_xlas_cpu_device.py", "-k", "transformers and llama"),
        ),
    ]


def conformance(*arguments: str) -> tuple[str, ...]:
    """The command of the conformance suite."""
    waivers = ("--waivers", str(WAIVERS)) if WAIVERS.is_file() and "--waivers" not in arguments else ()
    return ("mvllm", "conformance", "--platform", "tpu", *waivers, *arguments)


def tests(*arguments: str) -> tuple[str, ...]:
    """The command of the repository's tests. The environment has only the platform under test."""
    return ("pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *arguments)


def start(command: Sequence[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a command of the environment that writes into `log`."""
    program = [str(LANE.python), str(ROOT / "ci" / "without_destructors.py"), *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            program,
            cwd=ROOT,
            env=LANE.variables(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run(parts: Sequence[Part], seconds: float = SETUP_SECONDS, start_command: Start = start) -> int:
    """Creates the environment and runs all parts, also after failures.

    Each part uses about one core, so as many parts run at once as there are cores. The output of a part is printed at
    its end; until then a line per minute shows the progress.

    Returns:
        0 if all passed, 1 if one failed, NOT_RUN if the environment could not be made.
    """
    try:
        setup(seconds)
    except NotRun as reason:
        print(f"tpu: NOT RUN: {reason}", flush=True)
        return NOT_RUN
    for folder in (REPORTS, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    at_once = min(os.cpu_count() or 1, len(parts))
    print(f"\ntpu: {len(parts)} parts, {at_once} at a time; their output goes to {LOGS}", flush=True)
    waiting, running, failed = list(parts), list[Running](), list[str]()
    last_line = time.monotonic()
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
            if running and time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                print(f"tpu: {'; '.join(each.progress() for each in running)}", flush=True)
            if running:
                time.sleep(0.2)
    finally:
        for each in running:  # after an interrupt, all parts end
            each.process.terminate()
        for each in running:
            each.end()
    titles = "; ".join(part.title for part in parts)
    print(
        f"\ntpu: FAILED: {'; '.join(failed)}" if failed else f"\ntpu: passed on XLA's CPU device: {titles}", flush=True
    )
    return 1 if failed else 0
