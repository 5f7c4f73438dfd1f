"""DeviceRuntime of the host, for platforms whose device only runs graph programs."""

from __future__ import annotations

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from mvllm.graph.program_process import ProcessCompiler
from mvllm.platform.graph_compiler import GraphCompiler
from mvllm.platform.runtime import DeviceRuntime, FinishedHostCopy, HostCopy, MemoryInfo
from mvllm.platform.topology import WorkerContext


class HostRuntime(DeviceRuntime):
    """Tensors of core in host memory. All calls are synchronous.

    `memory` reports the host's memory. A platform whose device has memory of its own overrides it.

    Args:
        ctx: Which worker this is.
        compiler: The platform's compiler. If it has a process of its own, its memory counts as this worker's.
    """

    def __init__(self, ctx: WorkerContext, compiler: GraphCompiler | None = None) -> None:
        self._compiler = compiler if isinstance(compiler, ProcessCompiler) else None
        self.device = torch.from_numpy(np.empty(0)).device
        self._process = psutil.Process()
        self.seed(ctx.seed)

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        host, resident = psutil.virtual_memory(), self._process.memory_info().rss
        if self._compiler is not None:
            resident += self._compiler.memory_bytes()
        return MemoryInfo(total=host.total, free=host.available, used_by_me=resident, peak_by_me=resident)

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
