"""Device properties that the launchers read."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_PROCESSORS = 8
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


def has_ptx(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device executes the PTX of kernels/packed_numbers.py for a compute dtype."""
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.version.hip is None
