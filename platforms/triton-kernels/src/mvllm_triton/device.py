"""Device properties that the launchers read."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_PROCESSORS = 8
_LEAST_SHARED_MEMORY = 64 << 10
"""Shared memory of a program in bytes that all devices have."""

_NAMES = ("multi_processor_count", "gpu_subslice_count", "max_compute_units")
"""Names of the count in torch's device properties. The last one counts parts of multiprocessors and always exists."""


@cache
def processors(device: torch.device) -> int:
    """Number of programs that run in parallel at least: the device's multiprocessors or their equivalent; a small
    number without a device.
    """
    if device.type in ("cpu", "meta"):
        return _INTERPRETED_PROCESSORS
    properties = torch.get_device_module(device).get_device_properties(device)
    return next(int(getattr(properties, name)) for name in _NAMES if hasattr(properties, name))


@cache
def shared_memory(device: torch.device) -> int:
    """Shared memory that a program can have, in bytes; the least of all devices if torch does not report it."""
    if device.type in ("cpu", "meta"):
        return _LEAST_SHARED_MEMORY
    properties = torch.get_device_module(device).get_device_properties(device)
    return max(_LEAST_SHARED_MEMORY, int(getattr(properties, "shared_memory_per_block_optin", 0)))
