"""Device properties that the launchers read."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_PROCESSORS = 8
_INTERPRETED_SHARED_MEMORY = 64 << 10
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
    """Bytes of shared memory that a program may have; those of the smallest supported device without a device."""
    if device.type in ("cpu", "meta"):
        return _INTERPRETED_SHARED_MEMORY
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("shared_memory_per_block_optin", "shared_memory_per_block", "local_mem_size"):
        if size := int(getattr(properties, name, 0)):
            return size
    return _INTERPRETED_SHARED_MEMORY


@cache
def warp_size(device: torch.device) -> int:
    """Threads of a warp."""
    if device.type in ("cpu", "meta"):
        return 32
    return int(getattr(torch.get_device_module(device).get_device_properties(device), "warp_size", 32))


@cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether products of 64 rows are summed in a memory of their own instead of registers (sm_100, sm_103)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return int(torch.get_device_module(device).get_device_properties(device).major) == 10


@cache
def multiplies_from_registers(device: torch.device) -> bool:
    """Whether NVIDIA's matrix instructions read both matrices from registers; on sm_90, sm_100 and sm_103 the second
    matrix is in shared memory.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return int(torch.get_device_module(device).get_device_properties(device).major) not in (9, 10)


@cache
def reads_float8(device: torch.device, float8: torch.dtype) -> bool:
    """Whether the device converts numbers of a float8 format with instructions of its own."""
    if device.type != "cuda":  # HIP devices have this name, too
        return False
    properties = torch.get_device_module(device).get_device_properties(device)
    if architecture := str(getattr(properties, "gcnArchName", "")):
        formats = {"gfx942": (torch.float8_e4m3fnuz,), "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2)}
        return float8 in formats.get(architecture.partition(":")[0], ())
    return (properties.major, properties.minor) >= (8, 9) and float8 in (torch.float8_e4m3fn, torch.float8_e5m2)


def has_ptx(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device executes the PTX of kernels/packed_numbers.py for a compute dtype."""
    return dtype == torch.bfloat16 and device.type == "cuda" and torch.version.hip is None
