"""The environment of a worker that shares a process with its engine core.

A worker with a process of its own is started with the variables that its platform wants. Here the process is somebody
else's, so they are there only while the engine starts, which is when libraries are loaded and read them; what is set
already stays as it is, and nothing remains for the caller's own children.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mvllm.config.engine_config import ParallelConfig
from mvllm.platform.ask import ask
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import LaunchTopology


@contextmanager
def worker_environment(parallel: ParallelConfig, platform: Platform) -> Iterator[None]:
    """Sets, for as long as it is open, the variables of the one worker of this process that nobody has set.

    Does nothing where workers have processes of their own, or where torch is loaded, and with it what reads them.
    """
    added = {} if "torch" in sys.modules else _missing(parallel, platform)
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in added.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _missing(parallel: ParallelConfig, platform: Platform) -> dict[str, str]:
    if parallel.distributed_executor_backend not in (None, "uni"):
        return {}
    with enter_phase(Phase.ENGINE):
        topology: LaunchTopology = ask(platform, "topology", parallel, returns=LaunchTopology)
    if topology.num_workers > 1 or not topology.env_per_worker:
        return {}
    return {name: value for name, value in topology.env_per_worker[0].items() if name not in os.environ}
