"""Rank processes that start quickly, as forks of a server that has imported torch.

    start_ranks(body, 2, "args")      body(rank, "args") in two processes

A rank that imports torch itself needs two seconds of a core. A fork of the test process would inherit the locks of its
threads without the threads.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing

PRELOADED = [
    "pytest",
    "torch.distributed",
    "torch.multiprocessing",
    "mvllm.distributed.parallel_groups",
    "mvllm.distributed.torch_communicator",
    "mvllm_cpu.shared_memory_communicator",
]
"""Modules that are not installed are skipped."""


def start_ranks(body: Callable[..., None], world_size: int, *args: object) -> None:
    """Runs `body(rank, *args)` in `world_size` processes; raises if one fails.

    Their environment variables are those at the time of the first call.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(body, args=args, nprocs=world_size, start_method="forkserver")
