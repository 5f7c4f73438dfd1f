"""The XPU platform: Intel GPUs through torch.xpu, Triton and XCCL."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from mvllm.plugin_api import (
    AttentionBackend,
    Capabilities,
    Check,
    Communicator,
    CompileBackend,
    ConfigError,
    DeviceRuntime,
    EngineConfig,
    GroupSpec,
    Plan,
    Platform,
    PlatformSpec,
    Refusals,
    WorkerContext,
    get_logger,
)
from mvllm_torch_gpu.device_discovery import TopologyError
from mvllm_torch_gpu.platform import TorchGpuPlatform
from mvllm_xpu import visible_devices
from mvllm_xpu.device_module import XPU
from mvllm_xpu.plugin import SPEC
from mvllm_xpu.probe import torch_has_graphs
from mvllm_xpu.settings import SETTINGS
from mvllm_xpu.topology import read_inventory

if TYPE_CHECKING:
    import torch

logger = get_logger("mvllm.xpu.platform")


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return XPUPlatform()


class XPUPlatform(TorchGpuPlatform):
    """Platform whose workers have one XPU device each."""

    title = "XPU"
    settings = SETTINGS
    device_variable = visible_devices.MASK
    module = XPU

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        captures = self._captures
        return dataclasses.replace(super().capabilities, graphs=captures, compile=captures)

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        answer = super().plan(config)
        mode = self.settings.compile_mode()
        if mode != "none" and not torch_has_graphs():
            variable = f"{self.settings.prefix}_COMPILE"
            raise ConfigError(
                f"{variable}={mode!r} captures steps in XPU graphs, which the installed torch does not have. Install a "
                f"newer one, in its build for XPU, or unset {variable}."
            )
        return answer

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_xpu.runtime import XpuRuntime

        return XpuRuntime(ctx, unified=self.uses_host_memory)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm_torch_gpu.communicator import DeviceCommunicator
        from mvllm_xpu import collective_backend

        return DeviceCommunicator(group, device, backend=collective_backend.backend(), advice=collective_backend.ADVICE)

    def attention_without_kernels(self) -> Sequence[type[AttentionBackend]]:
        from mvllm_xpu.attention import SdpaAttention

        return (SdpaAttention, *super().attention_without_kernels())

    def compiler(self) -> CompileBackend | None:
        return super().compiler() if self._captures else None

    def doctor(self) -> Sequence[Check]:
        from mvllm_xpu import doctor

        return doctor.checks()

    @cached_property
    def uses_host_memory(self) -> bool:
        """Whether the devices are integrated GPUs, which use the host's memory."""
        try:
            seen = visible_devices.resolve(read_inventory(), os.environ).devices
        except TopologyError as e:
            logger.debug("The kernel's files do not say which devices there are: %s", e)
            return False
        return bool(seen) and all(shown.device.integrated for shown in seen)

    @property
    def _captures(self) -> bool:
        """Whether decode steps are captured: on request, if torch supports it."""
        try:
            return self.settings.compile_mode() != "none" and torch_has_graphs()
        except ConfigError:
            return False  # `plan` raises the error
