"""All-reduce of small tensors without NCCL: ranks of one machine map each other's memory and read it directly.

Every rank copies its tensor into a buffer that the others have mapped. One-shot: each rank reads all tensors and adds
them up, with one exchange and (ranks - 1) × size bytes. Two-shot, for larger tensors: each rank sums one shard, then
all ranks read the sums of all shards, with two exchanges and fewer bytes.

    rank 0   buffer [ a ]      one-shot: every rank reads a b c d and stores a + b + c + d
    rank 1   buffer [ b ]

It pays where devices have a fast connection of their own; over the host's bus NCCL is faster, so a platform that can
tell asks for the connection first.

Mapping, signals and both kernels are torch's symmetric memory. They work within captured graphs.

`NcclCommunicator` first asks every rank for `problem_of`, because a rank that does not take part would leave the others
waiting in the mapping. Then it tests the sums on random numbers, and does not use them if any rank's result differs
from NCCL's or, in any bit, from another rank's. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mvllm.plugin_api import PlatformError

ONE_SHOT_BYTES = 256 << 10
"""Largest tensor for one-shot."""

MOST_BYTES = 2 << 20
"""Largest tensor for two-shot; NCCL adds larger ones."""

TRIAL_ELEMENTS = (8, 4096, 100_000, 300_000)
"""Sizes of the trial's bfloat16 tensors: the last one is summed in two shots."""

LinkCheck = Callable[[int, Sequence[int]], str | None]

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_MOST_RANKS = 8


class CustomAllReduce:
    """All-reduce of one group. All its ranks create it together.

    Args:
        group: Torch's process group, of ranks on one machine.
        device: This rank's device.

    Raises:
        RuntimeError: The ranks cannot map each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group.group_name
        self._buffer: torch.Tensor | None = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, self._name)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the kernels support a tensor's size, dtype and alignment."""
        return fits(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum, in a new tensor."""
        assert self._buffer is not None, "closed"
        part = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)
        if tensor.nbytes <= ONE_SHOT_BYTES:
            summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
            return summed
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", self._name)
        return part.clone()

    def close(self) -> None:
        """Frees the buffer."""
        self._buffer = None


def fits(tensor: torch.Tensor) -> bool:
    """Whether the kernels support a tensor; shapes and dtypes are equal on all ranks, so all ranks decide alike."""
    return tensor.dtype in _DTYPES and 0 < tensor.nbytes <= MOST_BYTES and tensor.nbytes % _ALIGNMENT == 0


def problem_of(devices: Sequence[int], device: torch.device, unlinked_devices: LinkCheck | None) -> str | None:
    """Why this rank cannot take part, or None. Does not communicate.

    Args:
        devices: The index of each rank's device, as that rank's process numbers it.
        device: This rank's device.
        unlinked_devices: Says why the devices are too far from each other; None for no such check.
    """
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401

        for operation in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            getattr(torch.ops.symm_mem, operation)  # raises if this torch has none
        check_peer_access(devices, torch.cuda.device_count(), device.index, torch.cuda.can_device_access_peer)
    except (ImportError, AttributeError, RuntimeError, PlatformError) as e:
        return str(e).partition("\n")[0]
    others = [each for each in devices if each != device.index]
    return None if unlinked_devices is None else unlinked_devices(device.index, others)


def check_peer_access(
    devices: Sequence[int], num_devices: int, device: int, can_access_peer: Callable[[int, int], bool]
) -> None:
    """Checks that this rank's device can read the memory of the other ranks' devices.

    Args:
        devices: The index of each rank's device, as that rank's process numbers it.
        num_devices: Devices that this process sees.
        device: This rank's device.
        can_access_peer: Returns whether a device (first argument) can read the memory of another (second argument).

    Raises:
        PlatformError: This rank's device cannot read the memory of every other rank, or does not see it.
    """
    if len(devices) > _MOST_RANKS:
        raise PlatformError(f"{len(devices)} ranks are more than {_MOST_RANKS}.")
    if len(set(devices)) < len(devices) or max(devices) >= num_devices:
        raise PlatformError(
            f"The ranks' processes see different devices: theirs are numbered {list(devices)}, and this one sees "
            f"{num_devices}."
        )
    unreadable = [other for other in devices if other != device and not can_access_peer(device, other)]
    if unreadable:
        raise PlatformError(f"The device {device} cannot read the memory of {unreadable}.")
