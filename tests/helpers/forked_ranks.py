"""Rank processes that start quickly, as forks of a server that has imported torch.

    start_ranks(body, 2, "args")      body(rank, "args") in two processes

A rank that imports torch by itself takes two seconds of a core before it does anything. A fork of the tests' own
process would have its threads' locks and none of its threads.
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

    Their environment variables are those of the first call.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(body, args=args, nprocs=world_size, start_method="forkserver")
