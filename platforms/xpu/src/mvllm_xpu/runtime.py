"""Runtime of one XPU device: the shared GPU runtime with the kernel's memory statistics and chip checks.

Not run on hardware.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from mvllm.plugin_api import PlatformError, get_logger
from mvllm_torch_gpu.device_discovery import TopologyError, describe_variables
from mvllm_torch_gpu.runtime import TorchGpuRuntime
from mvllm_xpu import chips, visible_devices
from mvllm_xpu.device_module import XPU
from mvllm_xpu.driver_memory import FdinfoDriverMemory
from mvllm_xpu.topology import XpuDevice, read_inventory

logger = get_logger("mvllm.xpu.runtime")


class XpuRuntime(TorchGpuRuntime):
    """TorchGpuRuntime of an XPU device."""

    library = "Level Zero"
    after_failure = "See the kernel's log (dmesg, entries of xe or i915); restart the engine."
    module = XPU

    def check_build(self) -> None:
        check_build()

    def visibility_variables(self) -> str:
        return describe_variables(visible_devices.VARIABLES, os.environ)

    def driver_memory(self, index: int) -> FdinfoDriverMemory:
        return FdinfoDriverMemory(device_at(index))

    def refusal(self, properties: Any) -> str | None:
        chip = chips.of_id(int(getattr(properties, "device_id", 0)))  # older versions of torch do not have it
        if chip is None or chip.supported:
            return None
        return (
            f"drives displays, and torch does not compute on it; needed is {chips.NEEDED}. Leave it out of "
            f"{visible_devices.MASK}."
        )


def check_build() -> None:
    """Checks that the loaded torch supports XPU devices.

    Raises:
        PlatformError: It was built for other devices.
    """
    if getattr(torch.version, "xpu", None) is None:
        raise PlatformError(
            f"torch {torch.__version__} was built without XPU. Install torch's build for XPU in its place, then "
            "reinstall mvllm-xpu."
        )


def device_at(index: int) -> XpuDevice | None:
    """The device that torch numbers `index`; None if it is unknown."""
    try:
        devices = visible_devices.resolve(read_inventory(), os.environ).devices
    except TopologyError as e:
        logger.debug("The kernel's files do not say which devices there are: %s", e)
        return None
    return devices[index].device if index < len(devices) else None
