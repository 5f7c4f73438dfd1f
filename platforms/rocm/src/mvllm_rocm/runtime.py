"""Runtime of one ROCm device: the shared GPU runtime with the driver's memory statistics and target checks.

Not run on hardware.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from mvllm.plugin_api import PlatformError, get_logger
from mvllm_rocm import targets, visible_devices
from mvllm_rocm.device_module import HIP
from mvllm_rocm.driver_memory import SysfsDriverMemory
from mvllm_rocm.topology import RocmDevice, read_inventory
from mvllm_torch_gpu.device_discovery import TopologyError, describe_variables
from mvllm_torch_gpu.runtime import TorchGpuRuntime

logger = get_logger("mvllm.rocm.runtime")


class RocmRuntime(TorchGpuRuntime):
    """TorchGpuRuntime of a ROCm device."""

    library = "HIP"
    others_counted = False  # HIP's free bytes ignore other compute processes and part of a desktop's use
    after_failure = "See the kernel's log (dmesg, entries of amdgpu) and amd-smi; restart the engine."
    module = HIP

    def check_build(self) -> None:
        check_build()

    def visibility_variables(self) -> str:
        return describe_variables(visible_devices.VARIABLES, os.environ)

    def driver_memory(self, index: int) -> SysfsDriverMemory:
        return SysfsDriverMemory(device_at(index))

    def refusal(self, properties: Any) -> str | None:
        target = str(properties.gcnArchName).partition(":")[0]
        if targets.is_supported(target):
            return None
        return f"is a {target}, needed is {targets.NEEDED}. Leave it out of {visible_devices.VARIABLE}."


def check_build() -> None:
    """Checks that the loaded torch supports ROCm devices.

    Raises:
        PlatformError: It was built for other devices.
    """
    if torch.version.hip is None:
        raise PlatformError(
            f"torch {torch.__version__} was built without ROCm. Install torch's build for ROCm in its place, then "
            "reinstall mvllm-rocm."
        )


def device_at(index: int) -> RocmDevice | None:
    """The device that HIP numbers `index`; None if it is unknown."""
    try:
        devices = visible_devices.resolve(read_inventory(), os.environ).devices
    except TopologyError as e:
        logger.debug("The driver's files cannot be read: %s", e)
        return None
    return devices[index] if index < len(devices) else None
