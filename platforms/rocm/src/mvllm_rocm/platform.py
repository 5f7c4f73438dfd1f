"""The ROCm platform: AMD devices through torch's build for HIP, Triton and RCCL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from mvllm.plugin_api import Check, DeviceRuntime, Platform, PlatformSpec, WorkerContext, get_logger
from mvllm_rocm import targets, visible_devices
from mvllm_rocm.device_module import HIP
from mvllm_rocm.plugin import SPEC
from mvllm_rocm.settings import SETTINGS
from mvllm_rocm.topology import RocmDevice, read_inventory
from mvllm_torch_gpu.device_discovery import TopologyError
from mvllm_torch_gpu.platform import TorchGpuPlatform

logger = get_logger("mvllm.rocm.platform")


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return ROCmPlatform()


class ROCmPlatform(TorchGpuPlatform):
    """Platform whose workers have one ROCm device each."""

    title = "ROCm"
    settings = SETTINGS
    device_variable = visible_devices.VARIABLE
    module = HIP

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_rocm.runtime import RocmRuntime

        return RocmRuntime(ctx, unified=self.uses_host_memory)

    def doctor(self) -> Sequence[Check]:
        from mvllm_rocm import doctor

        return doctor.checks()

    @cached_property
    def uses_host_memory(self) -> bool:
        """Whether the devices use the host's memory."""
        return bool(self._devices) and all(device.memory_bytes is None for device in self._devices)

    @cached_property
    def float8(self) -> str:
        """The format of float8 caches of all workers: e4m3fnuz if any device computes in it.

        The kernels read the codes of both formats on every device.
        """
        formats = {targets.float8(device.target) for device in self._devices}
        return "float8_e4m3fnuz" if "float8_e4m3fnuz" in formats else "float8_e4m3fn"

    @cached_property
    def multiplies_float8(self) -> bool:
        """Whether every visible device multiplies float8, all in the same format."""
        devices = self._devices
        return bool(devices) and all(
            targets.multiplies_float8(device.target) and targets.float8(device.target) == self.float8
            for device in devices
        )

    @cached_property
    def _devices(self) -> tuple[RocmDevice, ...]:
        try:
            return visible_devices.resolve(read_inventory(), os.environ).devices
        except TopologyError as e:
            logger.debug("The driver's files cannot be read: %s", e)
            return ()
