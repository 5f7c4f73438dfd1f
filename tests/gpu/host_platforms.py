"""The CUDA platform with the host as its device, to test the script and parts of the platform without one.

    interpreted   its own attention and operations: Triton's interpreter runs their kernels; no step is captured
    replayed      its captured steps and their shapes: torch operations run in place of the kernels

Neither says anything about time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import platforms.cuda.tests.interpreted  # noqa: F401  # before anything else imports Triton
from platforms.cuda.tests.hosted_platform import KERNELS, HostedPlatform

import mvllm_torch_gpu.attention
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    DeviceRuntime,
    OpProvider,
    PlatformSpec,
    WorkerContext,
)
from mvllm_cpu.runtime import CPURuntime
from mvllm_cuda.platform import CUDAPlatform
from mvllm_torch_gpu.ops import providers
from tests.gpu import interpreted_plugin, replayed_plugin


class InterpretedPlatform(CUDAPlatform):
    """See the module."""

    @property
    def spec(self) -> PlatformSpec:
        return interpreted_plugin.SPEC

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(
            super().capabilities,
            unified_memory=True,
            graphs=False,
            compile=False,
            pinned_memory=False,
            async_copies=False,
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        return CPURuntime(ctx)

    def ops(self) -> Sequence[OpProvider]:
        return providers()

    def doctor(self) -> tuple[()]:
        return ()


class ReplayedPlatform(HostedPlatform):
    """See the module."""

    @property
    def spec(self) -> PlatformSpec:
        return replayed_plugin.SPEC

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        for name, function in KERNELS.items():
            setattr(mvllm_torch_gpu.attention, name, function)
        return super().attention_backend(spec)

    def doctor(self) -> tuple[()]:
        return ()
