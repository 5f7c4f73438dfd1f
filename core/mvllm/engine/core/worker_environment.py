"""The environment of a worker that shares a process with its engine core.

A worker with a process of its own is started with the variables that its platform wants. Here the process is somebody
else's, so they are there only while the engine starts, which is when libraries are loaded and read them; what is set
already stays as it is, and nothing remains for the caller's own children. Of engines that start at the same time in
several threads, the last to have started takes away what they share.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mvllm.config.engine_config import ParallelConfig
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import LaunchTopology

_lock = threading.Lock()
_use_counts: Counter[str] = Counter()
"""Starts under way that want each variable, of those that were set here."""


@contextmanager
def worker_environment(parallel: ParallelConfig, platform: Platform) -> Iterator[None]:
    """Sets, for as long as it is open, the variables of the one worker of this process that nobody has set.

    Does nothing where workers have processes of their own, or where torch is loaded, and with it what reads them.
    """
    wanted = {} if "torch" in sys.modules else _platform_variables(parallel, platform)
    ours: dict[str, str] = {}
    try:
        _add(wanted, ours)
        yield
    finally:
        _remove(ours)


def _add(wanted: Mapping[str, str], ours: dict[str, str]) -> None:
    with _lock:
        for name, value in wanted.items():
            if name not in os.environ:
                os.environ[name] = value
            elif not _use_counts[name]:
                continue  # the user's own
            _use_counts[name] += 1
            ours[name] = os.environ[name]  # of the first to set it, whose value all have


def _remove(ours: Mapping[str, str]) -> None:
    with _lock:
        for name, value in ours.items():
            _use_counts[name] -= 1
            if not _use_counts[name] and os.environ.get(name) == value:
                del os.environ[name]


def _platform_variables(parallel: ParallelConfig, platform: Platform) -> dict[str, str]:
    if parallel.distributed_executor_backend not in (None, "uni"):
        return {}
    with enter_phase(Phase.ENGINE):
        topology: LaunchTopology = call_checked(platform, "topology", parallel, returns=LaunchTopology)
    if topology.num_workers > 1 or not topology.env_per_worker:
        return {}
    return dict(topology.env_per_worker[0])
