"""DeviceModule for `torch.xpu`, with its differences from `torch.cuda`.

device count   before the initialization it may come from another library, which ignores ONEAPI_DEVICE_SELECTOR
free bytes     integrated GPUs and some drivers of cards do not report them; torch raises then. Others report 0, or do
               not subtract what this process has allocated (vllm-project/vllm#49273, pytorch/pytorch#161381)
graphs         another class, in newer versions of torch; other threads may make driver calls during a capture
waiting        cannot be forbidden; an operation that waits fails in the capture
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from mvllm.plugin_api import get_logger
from mvllm_torch_gpu.device_module import DeviceModule
from mvllm_torch_gpu.message_text import first_line

if TYPE_CHECKING:
    import torch

logger = get_logger("mvllm.xpu.device_module")


class XpuModule(DeviceModule):
    """DeviceModule of `torch.xpu`."""

    type = "xpu"

    def device_count(self) -> int:
        try:
            self.api.init()
        except RuntimeError as e:
            logger.warning("Level Zero does not start: %s.", first_line(e))
            return 0
        return super().device_count()

    def free_and_total(self, device: torch.device) -> tuple[int | None, int]:
        try:
            free, total = super().free_and_total(device)
        except RuntimeError as e:
            if "free memory" not in str(e) and "free_memory" not in str(e):
                raise
            return None, int(self.api.get_device_properties(device).total_memory)
        if not free:
            return None, total
        return min(free, max(0, total - int(self.api.memory_reserved(device)))), total

    def new_graph(self) -> Any:
        return self.api.XPUGraph()

    def captures(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.api.graph(graph, pool=pool)
        return context

    @contextmanager
    def forbids_waiting(self) -> Iterator[None]:
        yield

    @contextmanager
    def allows_waiting(self) -> Iterator[None]:
        yield


XPU = XpuModule()
