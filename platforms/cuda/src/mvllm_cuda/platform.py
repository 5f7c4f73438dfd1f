"""The CUDA platform: NVIDIA devices through torch, Triton and NCCL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property

from mvllm.plugin_api import Check, DeviceRuntime, Platform, PlatformSpec, WorkerContext, get_logger
from mvllm_cuda import visible_devices
from mvllm_cuda.nvml import Inventory, NvmlError, read_inventory
from mvllm_cuda.plugin import SPEC
from mvllm_cuda.settings import SETTINGS
from mvllm_torch_gpu.platform import TorchGpuPlatform

logger = get_logger("mvllm.cuda.platform")

FLOAT8_CAPABILITY = (8, 9)
"""Lowest compute capability of devices that multiply 8-bit floats."""


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return CUDAPlatform()


DATA_CENTRE_BYTES = 70 << 30
"""Memory from which on a device counts as one for data centres: it holds the activations of large steps."""

TOKENS_OF_LARGE_STEP = 8192
"""Token budget on such devices. Larger steps are no faster per token, and delay requests that generate."""


class CUDAPlatform(TorchGpuPlatform):
    """Platform whose workers have one CUDA device each."""

    title = "CUDA"
    settings = SETTINGS
    device_variable = visible_devices.VARIABLE

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    def worker_variables(self) -> Mapping[str, str]:
        """Sets the order of devices, so that nvidia-smi, the probe and workers number them alike."""
        return (
            {}
            if visible_devices.ORDER_VARIABLE in os.environ
            else {visible_devices.ORDER_VARIABLE: visible_devices.PCI_ORDER}
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_cuda.runtime import CudaRuntime

        return CudaRuntime(ctx, unified=self.uses_host_memory)

    def unlinked_devices(self, device: int, others: Sequence[int]) -> str | None:
        from mvllm_cuda.runtime import unlinked_devices

        return unlinked_devices(device, others)

    def doctor(self) -> Sequence[Check]:
        from mvllm_cuda import doctor

        return doctor.checks()

    @cached_property
    def uses_host_memory(self) -> bool:
        """Whether the devices use the host's memory: NVML then reports no memory."""
        inventory = self._inventory
        if inventory is None:
            return False
        seen = visible_devices.resolve(inventory, os.environ).devices
        return bool(seen) and all(device.memory_bytes is None for device in seen)

    @cached_property
    def multiplies_float8(self) -> bool:
        """Whether every visible device is of compute capability 8.9 or newer."""
        inventory = self._inventory
        seen = () if inventory is None else visible_devices.resolve(inventory, os.environ).devices
        return bool(seen) and all(device.compute_capability >= FLOAT8_CAPABILITY for device in seen)

    @cached_property
    def tokens_of_large_step(self) -> int:
        """8192 if every visible device has the memory of one for data centres; else 0, which leaves core's default."""
        inventory = self._inventory
        seen = () if inventory is None else visible_devices.resolve(inventory, os.environ).devices
        is_large = bool(seen) and all((device.memory_bytes or 0) >= DATA_CENTRE_BYTES for device in seen)
        return TOKENS_OF_LARGE_STEP if is_large else 0

    @cached_property
    def _inventory(self) -> Inventory | None:
        try:
            return read_inventory()
        except NvmlError as e:
            logger.debug("NVML does not answer: %s", e)
            return None
