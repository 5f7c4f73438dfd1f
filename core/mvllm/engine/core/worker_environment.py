"""The platform's environment variables for a worker in the engine core's own process.

A worker process is started with the variables of its platform. In the caller's process they are set only while the
engine starts, when libraries are loaded and read them; variables that are set already keep their values, and none
remains for the caller's own child processes. If several threads start engines at once, the last one to finish removes
the shared variables.
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
"""The number of engine starts that use each variable that was set here."""


@contextmanager
def worker_environment(parallel: ParallelConfig, platform: Platform) -> Iterator[None]:
    """Within the context, sets the variables of this process' only worker that are not set already.

    Does nothing with worker processes, or if torch, whose libraries read the variables, is loaded already.
    """
    wanted = {} if "torch" in sys.modules else _platform_variables(parallel, platform)
    added: dict[str, str] = {}
    try:
        _add(wanted, added)
        yield
    finally:
        _remove(added)


def _add(wanted: Mapping[str, str], added: dict[str, str]) -> None:
    with _lock:
        for name, value in wanted.items():
            if name not in os.environ:
                os.environ[name] = value
            elif not _use_counts[name]:
                continue  # set by the user
            _use_counts[name] += 1
            added[name] = os.environ[name]  # the value of the first engine that set it


def _remove(added: Mapping[str, str]) -> None:
    with _lock:
        for name, value in added.items():
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
