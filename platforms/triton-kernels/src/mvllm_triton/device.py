"""What the launchers ask about a device."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_PROCESSORS = 8


@cache
def processors(device: torch.device) -> int:
    """Programs that run side by side at least: the device's multiprocessors; a small number without a device."""
    if device.type in ("cpu", "meta"):
        return _INTERPRETED_PROCESSORS
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.multi_processor_count)
