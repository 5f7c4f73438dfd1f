"""The XPU platform with the host as its device, through fake_device.py.

Its plans, runtime, memory accounting, graphs and communicator (over gloo) are the real ones. Torch functions with the
same signatures replace the Triton kernels; `WithoutKernels` uses the platform's attention without kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from platforms.xpu.tests.fake_device import HOSTED
from platforms.xpu.tests.hosted_plugin import SDPA, SPEC

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Communicator,
    CompileBackend,
    DeviceRuntime,
    GroupSpec,
    OpProvider,
    PlatformError,
    WorkerContext,
)
from mvllm_torch_gpu.communicator import DeviceCommunicator
from mvllm_torch_gpu.compiler import make_compiler
from mvllm_xpu import collective_backend
from mvllm_xpu.driver_memory import FdinfoDriverMemory
from mvllm_xpu.platform import XPUPlatform
from mvllm_xpu.runtime import XpuRuntime

MOST_TOKENS = 1 << 10
"""Maximum tokens of a sequence in a captured step."""


class HostedRuntime(XpuRuntime):
    """The platform's runtime over the replacement of torch.xpu."""

    module = HOSTED

    def check_build(self) -> None:
        pass

    def is_out_of_memory(self, error: Exception) -> bool:
        """Torch's allocator for the host raises a plain RuntimeError."""
        return "can't allocate memory" in str(error) or super().is_out_of_memory(error)

    def driver_memory(self, index: int) -> FdinfoDriverMemory:
        return FdinfoDriverMemory(None)


class HostedPlatform(XPUPlatform):
    """The XPU platform on the host; see the module."""

    module = HOSTED
    spec = SPEC
    uses_host_memory = True

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        return HostedRuntime(ctx, unified=self.uses_host_memory)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        return DeviceCommunicator(group, device, backend="gloo", advice=collective_backend.ADVICE)

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        attention = importlib.import_module("mvllm_torch_gpu.attention")
        for name, function in importlib.import_module("platforms.cuda.tests.hosted_platform").KERNELS.items():
            setattr(attention, name, function)
        return super().attention_backend(spec)

    def compiler(self) -> CompileBackend | None:
        """The platform's compiler with small tables, because the replaced kernels compute the full width of a table."""
        mode = self.settings.compile_mode()
        return None if mode == "none" else make_compiler(mode, HOSTED, table_tokens=MOST_TOKENS)

    def ops(self) -> Sequence[OpProvider]:
        return self.ops_without_kernels()

    def doctor(self) -> tuple[()]:
        return ()


class WithoutKernels(HostedPlatform):
    """The platform without Triton."""

    spec = SDPA

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        found, problems = self._without_kernels(spec)
        if found is None:
            raise PlatformError("; ".join(problems))
        return found
