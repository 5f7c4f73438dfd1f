"""Runtime of one CUDA device: the shared GPU runtime with NVML's memory statistics and CUDA's version checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from mvllm.plugin_api import PlatformError, get_logger
from mvllm_cuda import visible_devices
from mvllm_cuda.driver_memory import NvmlDriverMemory
from mvllm_cuda.nvml import NvmlError, opened, read_inventory
from mvllm_cuda.probe import MIN_CAPABILITY, dotted
from mvllm_torch_gpu.runtime import TorchGpuRuntime

logger = get_logger("mvllm.cuda.runtime")


class CudaRuntime(TorchGpuRuntime):
    """TorchGpuRuntime of a CUDA device."""

    library = "CUDA"
    after_failure = "See the kernel's log (dmesg, entries with Xid) and nvidia-smi; restart the engine."

    def check_build(self) -> None:
        check_build()

    def visibility_variables(self) -> str:
        variable = os.environ.get(visible_devices.VARIABLE)
        return "" if variable is None else f"{visible_devices.VARIABLE}={variable!r}"

    def driver_memory(self, index: int) -> NvmlDriverMemory:
        return NvmlDriverMemory(nvml_uuid(index))

    def refusal(self, properties: Any) -> str | None:
        found = (properties.major, properties.minor)
        if found >= MIN_CAPABILITY:
            return None
        return (
            f"has compute capability {dotted(found)}, needed is {dotted(MIN_CAPABILITY)} or newer. Leave it out of "
            f"{visible_devices.VARIABLE}."
        )


def check_build() -> None:
    """Checks that the loaded torch supports CUDA devices.

    Raises:
        PlatformError: It was built for other devices.
    """
    if torch.version.cuda is None:
        raise PlatformError(
            f"torch {torch.__version__} was built without CUDA. Install torch's build for CUDA in its place, then "
            "reinstall mvllm-cuda."
        )


def nvml_uuid(index: int) -> str | None:
    """NVML's UUID of the device that CUDA numbers `index`; None if it is unknown."""
    try:
        inventory = read_inventory()
    except NvmlError as e:
        logger.debug("NVML does not answer: %s", e)
        return None
    devices = visible_devices.resolve(inventory, os.environ).devices
    if index >= len(devices) or visible_devices.order_is_uncertain(inventory, os.environ):
        return None
    return devices[index].uuid


def unlinked_devices(device: int, others: Sequence[int]) -> str | None:
    """Why this device is not known to be connected with all others by NVLink, in CUDA's numbers; None if it is."""
    names = {index: nvml_uuid(index) for index in (device, *others)}
    try:
        with opened() as nvml:
            mine = names[device]
            unlinked = [n for n in others if mine is None or (o := names[n]) is None or not nvml.is_linked(mine, o)]
    except NvmlError as e:
        return f"NVML does not say what connects the devices: {e}."
    return f"NVLink does not connect the device {device} with {unlinked}." if unlinked else None
