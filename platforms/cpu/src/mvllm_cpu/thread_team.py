"""Logs the number of compute threads, which adapts to the load of the machine (csrc/team_size_controller.h)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from mvllm.plugin_api import get_logger
from mvllm_cpu import kernels

logger = get_logger("mvllm.cpu.threads")

_STEPS = 64
_PAUSE = 30.0


class ThreadUseLog:
    """Reads the number of threads at intervals and logs changes.

    Args:
        in_use: Returns the number of threads of the last call; 0 before the first one.
        configured: Returns the configured number of threads.
        interval: Steps between two readings.
        pause: Minimum seconds between two messages.
    """

    def __init__(
        self,
        in_use: Callable[[], int],
        configured: Callable[[], int] = torch.get_num_threads,
        interval: int = _STEPS,
        pause: float = _PAUSE,
    ) -> None:
        self._in_use = in_use
        self._configured = configured
        self._interval = interval
        self._pause = pause
        self._steps = 0
        self._logged: int | None = None
        self._next_message = 0.0

    def step(self) -> None:
        """Called in every step."""
        self._steps += 1
        if self._steps % self._interval:
            return
        in_use, configured = self._in_use(), self._configured()
        if not in_use or in_use == (self._logged or configured) or time.monotonic() < self._next_message:
            return
        if in_use < configured:
            logger.info(
                "Other programs use the cores: %d of %d threads compute. MVLLM_CPU_ADAPTIVE_THREADS=0 keeps all.",
                in_use,
                configured,
            )
        else:
            logger.info("The cores are free again: all %d threads compute.", configured)
        self._logged = in_use
        self._next_message = time.monotonic() + self._pause


@functools.cache
def thread_use_log() -> ThreadUseLog:
    """The log of this process. Needs `kernels.load().library`."""
    library = kernels.load().library
    assert library is not None, "attention with the kernels asks"
    return ThreadUseLog(library.mvllm_cpu_threads_in_use)
