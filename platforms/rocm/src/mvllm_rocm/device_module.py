"""DeviceModule for HIP, which torch names `torch.cuda`, with its difference from CUDA.

device count   before HIP has started it comes from AMD SMI, and is 0 if another copy of its library is loaded: the
               package amdsmi in addition to the copy in torch's wheel (pytorch/pytorch#186516)
"""

from __future__ import annotations

from mvllm.plugin_api import get_logger
from mvllm_torch_gpu.device_module import DeviceModule
from mvllm_torch_gpu.message_text import first_line

logger = get_logger("mvllm.rocm.device_module")


class HipModule(DeviceModule):
    """DeviceModule of `torch.cuda` in torch's build for ROCm."""

    def device_count(self) -> int:
        try:
            self.api.init()
        except (RuntimeError, AssertionError) as e:
            logger.warning("HIP does not start: %s.", first_line(e))
            return 0
        return super().device_count()


HIP = HipModule()
