"""Starts worker processes without an engine. Each binds a device, joins the process group and runs checks.

run_ranks(platform_under_test, 2, ["all_reduce"]) ──> python -m mvllm.testing._rank_process, twice, with topology's env
                                      <── one line per check: {"did": "all_reduce", "error": "", "digest": "..."}
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_api import LaunchTopology, ParallelConfig
from mvllm.testing.platform_under_test import PlatformUnderTest
from mvllm.testing.subprocess_checks import child_environment, read_answers

TIMEOUT_SECONDS = 300.0


@dataclass
class RankResult:
    """The results of one rank.

    Attributes:
        answers: Results by check: `error` (empty if it passed), `digest` of the results, and for `bind` the `device`.
        status: Exit status; None if the process was killed after the timeout.
        output: All output of the process.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: int | None = None
    output: str = ""

    def error_of(self, check: str) -> str:
        """The error message of a check; empty if it passed."""
        if check in self.answers:
            return str(self.answers[check]["error"])
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
    init_method = None if local_ranks is not None or world_size == 1 else f"tcp://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
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
            }
            output = Path(folder) / f"rank{rank}"
            with output.open("wb") as output_file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mvllm.testing._rank_process", json.dumps(job)],
                    env=child_environment({**os.environ, **variables}),
                    stdin=subprocess.DEVNULL,
                    stdout=output_file,
                    stderr=subprocess.STDOUT,
                )
            started.append((process, output))
        return _collect(started)


def _collect(started: list[tuple[subprocess.Popen[bytes], Path]]) -> list[RankResult]:
    results = []
    try:
        for process, output in started:
            result = RankResult()
            try:
                result.status = process.wait(TIMEOUT_SECONDS)
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
        error = last.error_of("bind")
        _KNOWN[key] = f"{count} workers need more devices than this machine has: {error}" if error else ""
    return _KNOWN[key]


@functools.cache
def run_collectives(name: str, world_size: int) -> tuple[RankResult, ...]:
    """Results of all checks in `_rank_process.CHECKS` for a group of `world_size` ranks; cached."""
    from mvllm.testing._rank_process import CHECKS

    return tuple(run_ranks(PlatformUnderTest(name), world_size, list(CHECKS)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
