"""Device properties that the launchers read."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_PROCESSORS = 8
_NAMES = ("multi_processor_count", "gpu_subslice_count", "max_compute_units")
"""What torch's properties of a device call them; the last counts parts of them, and is there in any case."""


@cache
def processors(device: torch.device) -> int:
    """Programs that run side by side at least: the device's multiprocessors, or what it has in their place; a small
    number without a device.
    """
    if device.type in ("cpu", "meta"):
        return _INTERPRETED_PROCESSORS
    properties = torch.get_device_module(device).get_device_properties(device)
    return next(int(getattr(properties, name)) for name in _NAMES if hasattr(properties, name))
