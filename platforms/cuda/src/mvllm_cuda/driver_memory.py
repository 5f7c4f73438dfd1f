"""Memory of one device as NVML reports it."""

from __future__ import annotations

import os

from mvllm.plugin_api import get_logger
from mvllm_cuda.nvml import NvmlError, opened

logger = get_logger("mvllm.cuda.driver_memory")


class NvmlDriverMemory:
    """DriverMemory of one CUDA device, from NVML.

    Args:
        uuid: The device's UUID in NVML; None if NVML does not list it.
    """

    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def held_by_this_process(self) -> int | None:
        """Bytes that this process holds on the device; None if NVML cannot tell."""
        if self._uuid is None:
            return None
        try:
            with opened() as nvml:
                return nvml.bytes_of_process(self._uuid, os.getpid())
        except NvmlError as e:
            logger.debug("NVML does not say what this process holds: %s", e)
            return None

    def free(self) -> int | None:
        """Free bytes of the device, without a context on it; None if NVML cannot tell."""
        if self._uuid is None:
            return None
        try:
            with opened() as nvml:
                found = nvml.memory(self._uuid)
        except NvmlError as e:
            logger.debug("NVML does not say how much is free: %s", e)
            return None
        return None if found is None else found[1]
