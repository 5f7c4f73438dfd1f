"""DeviceRuntime of the host, for platforms whose device only runs graph programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from mvllm.plugin_api import DeviceRuntime, FinishedHostCopy, HostCopy, MemoryInfo, WorkerContext
from mvllm_graph.program_process import compiler_pids

_PROCESSES = Path("/proc")


class HostRuntime(DeviceRuntime):
    """Tensors of core in host memory. All calls are synchronous.

    `memory` reports the host's memory. The memory of this worker's compiler processes counts as its own. A platform
    whose device has memory of its own overrides it.

    Args:
        ctx: Which worker this is.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        self.device = torch.from_numpy(np.empty(0)).device
        self._peak = 0
        self.seed(ctx.seed)

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        host, found = psutil.virtual_memory(), list(_resident_and_peak())
        resident, peak = (sum(sizes) for sizes in zip(*found, strict=True))
        self._peak = max(self._peak, peak)
        return MemoryInfo(total=host.total, free=host.available, used_by_me=resident, peak_by_me=self._peak)

    def reset_peak_memory(self) -> None:
        self._peak = 0
        for pid in (os.getpid(), *compiler_pids()):
            with suppress(OSError):  # no Linux, or a process that has just ended
                (_PROCESSES / str(pid) / "clear_refs").write_text("5")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as e:
            raise MemoryError(f"A tensor of shape {shape} and {dtype} does not fit: {e}") from e

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return FinishedHostCopy(tensor)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def _resident_and_peak() -> Iterator[tuple[int, int]]:
    """Resident memory and its peak, of this process and of each compiler process."""
    for pid in (os.getpid(), *compiler_pids()):
        with suppress(psutil.NoSuchProcess):
            resident = psutil.Process(pid).memory_info().rss
            yield resident, max(resident, _peak_of(pid))


def _peak_of(pid: int) -> int:
    """Peak of the resident memory since the last reset; 0 if the system does not tell it."""
    with suppress(OSError):
        for line in (_PROCESSES / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
