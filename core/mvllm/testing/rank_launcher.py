"""Worker processes without an engine: each binds a device, meets the others, and tries what it is told.

run_ranks(platform_under_test, 2, ["all_reduce"]) ──> python -m mvllm.testing._rank_process, twice, as its topology says
                                      <── a line per thing tried: {"did": "all_reduce", "error": "", "digest": "..."}
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
    """What one rank said.

    Attributes:
        answers: By what was tried: `error` (empty when all is well), where it makes sense `digest`, and of `bind` the
            `device`.
        status: Exit status; None when it had to be killed.
        output: Everything it printed.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: int | None = None
    output: str = ""

    def error_of(self, what: str) -> str:
        """Why `what` went wrong; empty when it did not."""
        if what in self.answers:
            return str(self.answers[what]["error"])
        ended = "had to be killed" if self.status is None else f"ended with status {self.status}"
        reached = next(reversed(self.answers), "nothing")
        return f"it {ended} before {what}; it had done {reached}. Its output:\n{self.output[-2000:]}"


def topology_of(platform_under_test: PlatformUnderTest, parallel: ParallelConfig) -> LaunchTopology:
    """The platform's answer."""
    with enter_phase(Phase.ENGINE):
        return platform_under_test.platform.topology(parallel)


def parallel_config(tensor: int = 1, pipeline: int = 1) -> ParallelConfig:
    """Of so many ranks."""
    return ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def run_ranks(
    platform_under_test: PlatformUnderTest,
    world_size: int,
    what: list[str],
    *,
    local_ranks: list[int] | None = None,
    num_devices: int = 1,
    parallel: ParallelConfig | None = None,
    checkpoint: Path | None = None,
) -> list[RankResult]:
    """Starts the ranks of one world and returns what they say, in rank order.

    Args:
        world_size: Ranks.
        what: What each tries, in this order; names of `_rank.TRIALS`.
        local_ranks: Start these ranks only, each on its own: they meet nobody.
        num_devices: Devices that each drives.
        parallel: The engine whose workers they are; None for one that is tensor-parallel over all their devices.
        checkpoint: A folder, for those that load one.
    """
    topology = topology_of(platform_under_test, parallel or parallel_config(tensor=world_size * num_devices))
    meeting = None if local_ranks is not None or world_size == 1 else f"tcp://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world_size) if local_ranks is None else local_ranks:
            variables = topology.env_per_worker[rank] if topology.env_per_worker else {}
            order = {
                "platform": platform_under_test.name,
                "rank": rank,
                "world_size": world_size,
                "init_method": meeting,
                "dtypes": platform_under_test.capabilities.dtypes,
                "what": what,
                "num_devices": num_devices,
                "checkpoint": str(checkpoint or ""),
            }
            output = Path(folder) / f"rank{rank}"
            with output.open("wb") as sink:
                process = subprocess.Popen(
                    [sys.executable, "-m", "mvllm.testing._rank_process", json.dumps(order)],
                    env=child_environment({**os.environ, **variables}),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
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
    platform_under_test: PlatformUnderTest, what: str, num_devices: int = 2, checkpoint: Path | None = None
) -> RankResult:
    """A worker that drives so many devices, having bound them and tried one thing of `_rank.MULTI_DEVICE_CHECKS`."""
    [result] = run_ranks(platform_under_test, 1, ["bind", what], num_devices=num_devices, checkpoint=checkpoint)
    return result


def why_not_devices(platform_under_test: PlatformUnderTest, count: int) -> str:
    """Why one worker does not drive `count` devices on this platform; empty when it does."""
    topology = topology_of(platform_under_test, parallel_config(tensor=count))
    if topology.num_workers > 1:
        return f"{count} tensor-parallel ranks are {topology.num_workers} workers of its topology"
    if platform_under_test.platform.worker_class() is not None:
        return "it has a worker class of its own, which spreads what it likes"
    return ""


_KNOWN: dict[tuple[str, int, int], str] = {}


def why_not_ranks(platform_under_test: PlatformUnderTest, tensor: int = 1, pipeline: int = 1) -> str:
    """Why the workers of an engine of so many ranks cannot run side by side on this machine; empty when they can.

    Where the probe saw that many devices they must run, and nothing is asked. Elsewhere the last of them tries to bind
    its devices: platforms may put several workers on one.
    """
    if tensor * pipeline <= max(1, platform_under_test.num_devices):
        return ""
    key = (platform_under_test.name, tensor, pipeline)
    if key not in _KNOWN:
        parallel = parallel_config(tensor, pipeline)
        count = topology_of(platform_under_test, parallel).num_workers
        each = parallel.world_size // count
        [last] = run_ranks(
            platform_under_test, count, ["bind"], local_ranks=[count - 1], num_devices=each, parallel=parallel
        )
        error = last.error_of("bind")
        _KNOWN[key] = f"{count} workers need devices that are not here: {error}" if error else ""
    return _KNOWN[key]


@functools.cache
def run_collectives(name: str, world_size: int) -> tuple[RankResult, ...]:
    """What the ranks of a world say about everything in `_rank.TRIALS`; asked once in a process."""
    from mvllm.testing._rank_process import CHECKS

    return tuple(run_ranks(PlatformUnderTest(name), world_size, list(CHECKS)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
