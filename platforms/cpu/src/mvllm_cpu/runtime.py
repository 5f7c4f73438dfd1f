"""DeviceRuntime of the CPU: device memory is host memory, and all calls are synchronous."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mvllm.plugin_api import DeviceRuntime, FinishedHostCopy, MemoryInfo, WorkerContext, get_logger
from mvllm_cpu import host_resources, memory, shared_weights, workspace

if TYPE_CHECKING:
    from mvllm.plugin_api import HostCopy

logger = get_logger("mvllm.cpu.runtime")

_ALLOCATOR_ERRORS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""Error texts of torch's CPU allocator without memory, on different systems."""


def bind_threads(ctx: WorkerContext) -> None:
    """Binds this worker to its share of the cores and sets its number of threads.

    A worker with its own process is bound to its cores. A worker in the caller's process is not, because that would
    bind the caller's threads as well. There the number of threads is only lowered (for example to a CPU quota), and
    not changed if the user has set OMP_NUM_THREADS.
    """
    share = host_resources.core_share(ctx.local_rank, ctx.local_world_size)
    if ctx.in_engine_process:
        if host_resources.threads_asked_for() is None:
            torch.set_num_threads(min(torch.get_num_threads(), share.threads))
        return
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, share.cpus)
        except OSError as e:
            logger.warning("Worker %d runs unbound: binding to cores %s failed: %s", ctx.rank, share.cpus, e)
    torch.set_num_threads(share.threads)


class CPURuntime(DeviceRuntime):
    """The CPU, with threads bound and the random generator seeded."""

    def __init__(self, ctx: WorkerContext) -> None:
        allowed = host_resources.allowed_cpus()
        bind_threads(ctx)
        if ctx.local_rank == 0:
            chosen = host_resources.describe_threads(torch.get_num_threads(), ctx.local_world_size, allowed)
            logger.info("Threads that compute: %s.", chosen)
        self.device = torch.device("cpu")
        self.seed(ctx.seed)

    def bind_thread(self) -> None:
        """Gives the thread the number of compute threads that was set in the first one: OpenMP keeps it for each."""
        torch.get_num_threads()

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        resident, peak = host_resources.resident_memory()
        return MemoryInfo(
            total=host_resources.memory_total(), free=host_resources.memory_free(), used_by_me=resident, peak_by_me=peak
        )

    def reset_peak_memory(self) -> None:
        host_resources.reset_peak_resident_memory()

    def release_cached_memory(self) -> None:
        workspace.process_workspace.release()
        memory.trim_heap()

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's CPU allocator raises a plain RuntimeError."""
        is_allocator_error = isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_ERRORS)
        return is_allocator_error or super().is_out_of_memory(error)

    def end_warm_up(self) -> None:
        shared_weights.log_summary()
        self.release_cached_memory()  # freed memory of imports and loading
        memory.release_code_pages()

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
