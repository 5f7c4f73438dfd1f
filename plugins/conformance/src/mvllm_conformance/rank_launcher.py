"""Starts worker processes without an engine. Each binds a device, joins the process group and runs checks.

run_ranks(platform_under_test, 2, ["all_reduce"]) ──> python -m mvllm_conformance._rank_process, twice, topology's env
                                      <── one line per check: {"did": "all_reduce", "error": "", "digest": "..."}
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvllm.extension_api.remote_executors import anonymous_file
from mvllm.extension_api.testing import enter_phase
from mvllm.plugin_api import LaunchTopology, ParallelConfig, Phase
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.subprocess_checks import child_environment, read_answers

TIMEOUT_SECONDS = 300.0
"""For all checks of a rank after it has joined its group."""

START_CALLS = {"bind": "Platform.init_device", "join": "Platform.communicator"}
"""What the first checks call, each with the time limit `PlatformUnderTest.start_timeout`."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass
class RankResult:
    """The results of one rank.

    Attributes:
        answers: Results by check: `error` (empty if it passed), `digest` of the results, and for `bind` the `device`.
        status: Exit status; None if the process was killed after the timeout.
        output: All output of the process.
        start_timeout: Seconds that each of START_CALLS may take.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: int | None = None
    output: str = ""
    start_timeout: float = 0.0

    def hung_in(self) -> str:
        """The method of START_CALLS that did not return; empty if both did."""
        left = [call for check, call in START_CALLS.items() if check not in self.answers]
        return left[0] if left and "Timeout (" in self.output else ""

    def error_of(self, check: str) -> str:
        """The error message of a check; empty if it passed."""
        if check in self.answers:
            return str(self.answers[check]["error"])
        if call := self.hung_in():
            stack = self.output.partition("Timeout (")[2]
            # faulthandler prints the innermost call first, and the main thread last.
            frames = list(_FRAME.finditer(stack.rpartition("hread 0x")[2]))
            shown = ", called by ".join(
                f"{f['function']} ({os.path.basename(f['file'])}:{f['line']})" for f in frames[:4]
            )
            return f"{call} did not return within {self.start_timeout:g} s; it waits in {shown}. Its stack:\n{stack}"
        ended = "was killed after the timeout" if self.status is None else f"ended with status {self.status}"
        last = next(reversed(self.answers), "none")
        return f"the process {ended} before {check}; last check: {last}. Its output:\n{self.output[-2000:]}"


def topology_of(platform_under_test: PlatformUnderTest, parallel: ParallelConfig) -> LaunchTopology:
    """The platform's launch topology."""
    with enter_phase(Phase.ENGINE):
        return platform_under_test.platform.topology(parallel)


def parallel_config(tensor: int = 1, pipeline: int = 1) -> ParallelConfig:
    """A ParallelConfig with the given sizes."""
    return ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def run_ranks(
    platform_under_test: PlatformUnderTest,
    world_size: int,
    checks: list[str],
    *,
    local_ranks: list[int] | None = None,
    num_devices: int = 1,
    parallel: ParallelConfig | None = None,
    checkpoint: Path | None = None,
) -> list[RankResult]:
    """Starts the ranks of one group and returns their results, in rank order.

    Args:
        world_size: Number of ranks.
        checks: Names of checks in `_rank_process`, in order.
        local_ranks: Start these ranks only, without a group.
        num_devices: Devices of each rank.
        parallel: The parallel configuration; None for tensor parallelism over all devices.
        checkpoint: Model folder for checks that load one.
    """
    topology = topology_of(platform_under_test, parallel or parallel_config(tensor=world_size * num_devices))
    meets = local_ranks is None and world_size > 1
    with tempfile.TemporaryDirectory() as folder, _rendezvous() if meets else nullcontext((None, ())) as found:
        init_method, inherited = found
        started = []
        for rank in range(world_size) if local_ranks is None else local_ranks:
            variables = topology.env_per_worker[rank] if topology.env_per_worker else {}
            job = {
                "platform": platform_under_test.name,
                "rank": rank,
                "world_size": world_size,
                "init_method": init_method,
                "dtypes": platform_under_test.capabilities.dtypes,
                "checks": checks,
                "num_devices": num_devices,
                "checkpoint": str(checkpoint or ""),
                "start_timeout": platform_under_test.start_timeout,
                "barrier_files": str(Path(folder) / "barrier"),
            }
            output = Path(folder) / f"rank{rank}"
            with output.open("wb") as output_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mvllm_conformance._rank_process", json.dumps(job)],
                    env=child_environment({**os.environ, **variables}),
                    stdin=subprocess.DEVNULL,
                    stdout=output_file,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                )
            started.append((process, output))
        return _collect(started, platform_under_test.start_timeout)


def _collect(started: list[tuple[subprocess.Popen[bytes], Path]], start_timeout: float) -> list[RankResult]:
    results = []
    deadline = time.monotonic() + len(START_CALLS) * start_timeout + TIMEOUT_SECONDS
    try:
        for process, output in started:
            result = RankResult(start_timeout=start_timeout)
            try:
                result.status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for other, _ in started:
                    other.kill()
            result.output = output.read_text(encoding="utf-8", errors="replace")
            result.answers = {answer["did"]: answer for answer in read_answers(result.output)}
            results.append(result)
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    return results


def run_on_multiple_devices(
    platform_under_test: PlatformUnderTest, check: str, num_devices: int = 2, checkpoint: Path | None = None
) -> RankResult:
    """Runs one check of `_rank_process.MULTI_DEVICE_CHECKS` in a worker with `num_devices` devices."""
    [result] = run_ranks(platform_under_test, 1, ["bind", check], num_devices=num_devices, checkpoint=checkpoint)
    return result


def multi_device_skip_reason(platform_under_test: PlatformUnderTest, count: int) -> str:
    """Reason why the platform does not run `count` devices in one worker; empty if it does."""
    topology = topology_of(platform_under_test, parallel_config(tensor=count))
    if topology.num_workers > 1:
        return f"its topology starts {topology.num_workers} workers, not one, for {count} tensor-parallel ranks"
    if platform_under_test.platform.worker_class() is not None:
        return "the platform has its own worker class, which distributes tensors itself"
    return ""


_KNOWN: dict[tuple[str, int, int], str] = {}


def ranks_skip_reason(platform_under_test: PlatformUnderTest, tensor: int = 1, pipeline: int = 1) -> str:
    """Reason why an engine with these parallel sizes cannot run on this machine; empty if it can.

    If the probe found enough devices, the engine must run. Otherwise the last rank tries to bind its devices, since
    platforms may place several workers on one device.
    """
    if tensor * pipeline <= max(1, platform_under_test.num_devices):
        return ""
    key = (platform_under_test.name, tensor, pipeline)
    if key not in _KNOWN:
        parallel = parallel_config(tensor, pipeline)
        count = topology_of(platform_under_test, parallel).num_workers
        num_devices = parallel.world_size // count
        [last] = run_ranks(
            platform_under_test, count, ["bind"], local_ranks=[count - 1], num_devices=num_devices, parallel=parallel
        )
        error = "" if last.hung_in() else last.error_of("bind")  # the tests of several ranks then say where it waits
        _KNOWN[key] = f"{count} workers need more devices than this machine has: {error}" if error else ""
    return _KNOWN[key]


_COLLECTIVES: dict[tuple[str, int], tuple[RankResult, ...]] = {}


def run_collectives(platform_under_test: PlatformUnderTest, world_size: int) -> tuple[RankResult, ...]:
    """Results of all checks in `_rank_process.CHECKS` for a group of `world_size` ranks; cached."""
    from mvllm_conformance._rank_process import CHECKS

    key = (platform_under_test.name, world_size)
    if key not in _COLLECTIVES:
        _COLLECTIVES[key] = tuple(run_ranks(platform_under_test, world_size, list(CHECKS)))
    return _COLLECTIVES[key]


def known_start_error(platform_under_test: PlatformUnderTest, world_size: int) -> str:
    """Why the ranks of `run_collectives` did not find each other, so that no engine waits again; empty if they did."""
    results = _COLLECTIVES.get((platform_under_test.name, world_size), ())
    errors = (f"rank {rank}: {result.error_of('join')}" for rank, result in enumerate(results) if result.hung_in())
    return next(errors, "")


@contextmanager
def _rendezvous() -> Iterator[tuple[str, tuple[int, ...]]]:
    """A rendezvous URL of the kind that an engine on this machine gives to its workers, and what they must inherit."""
    if Path("/proc/self/fd").is_dir():
        fd = anonymous_file("rendezvous")
        try:
            yield f"file:///proc/self/fd/{fd}", (fd,)
        finally:
            os.close(fd)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}", ()
