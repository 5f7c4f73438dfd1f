"""Communicators over torch.distributed: for any vendor's library, and for NCCL with a faster all-reduce of small
tensors.

In torch's build for ROCm the backend `nccl`, with its variables, is RCCL.

A decode step all-reduces a few kilobytes twice per layer, which the latency of NCCL's ring or tree dominates. Devices
that can map each other's memory use `custom_all_reduce.py`, a `SmallAllReduce`, instead, if all ranks can and a trial
gives the right sums; NCCL adds the tensors that it does not support.

    every rank     one machine? ── peer access? ── linked? ── map memory ── trial: NCCL's sums, equal bits? ── used
                        └──────────────┴───────────────┴───────────┴─────────────┴── any no on any rank: NCCL on all

Not run on hardware.
"""

from __future__ import annotations

import hashlib
import platform
from typing import Protocol

import torch
import torch.distributed as dist

from mvllm.plugin_api import GroupSpec, PlatformError, TorchCommunicator, get_logger
from mvllm_torch_gpu.custom_all_reduce import TRIAL_ELEMENTS, CustomAllReduce, LinkCheck, problem_of

logger = get_logger("mvllm.torch_gpu.communicator")

_ADVICE = "Set NCCL_DEBUG=INFO to see what NCCL tries; between machines, NCCL_SOCKET_IFNAME names the network to use."


class SmallAllReduce(Protocol):
    """All-reduce of small tensors over the ranks of a group. All ranks make the same calls."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it supports a tensor; the answer is the same on all ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, equal on all of them."""

    def close(self) -> None:
        """Frees its memory."""


class DeviceCommunicator(TorchCommunicator):
    """A group of ranks with one device each, over the vendor's library of collectives.

    Args:
        spec: The group.
        device: This rank's device, current in this process.
        backend: Name of torch's backend.
        advice: Hint in the error if ranks cannot connect.
        timeout: Seconds after which a collective that some rank has not joined fails.

    Raises:
        PlatformError: The ranks cannot connect.
    """

    def __init__(
        self, spec: GroupSpec, device: torch.device, *, backend: str, advice: str, timeout: float = 600.0
    ) -> None:
        try:
            super().__init__(spec, backend=backend, device=device, timeout=timeout)
            # Such libraries connect in the first collective; connecting here gives failures a clear error.
            super().all_reduce(torch.zeros(1, device=device))
        except RuntimeError as e:
            raise PlatformError(
                f"The ranks {list(spec.ranks)} of group {spec.name!r} do not find each other: "
                f"{str(e).partition(chr(10))[0]}. {advice}"
            ) from e
        self._connected: set[int] = set()

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._connect_pair(destination)
        super().send(tensor, destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        self._connect_pair(source)
        return super().recv(shape, dtype, source)

    def _connect_pair(self, other: int) -> None:
        """Connects this rank with another before their first message.

        Such libraries connect two ranks when one sends and the other receives: two ranks that both send first would
        deadlock. So they first exchange one element in a fixed order.
        """
        if other in self._connected:
            return
        self._connected.add(other)
        word, peer = torch.zeros(1, device=self._device), self._global(other)
        for sends in (True, False) if self.rank < other else (False, True):
            if sends:
                dist.send(word, dst=peer, group=self._group)
            else:
                dist.recv(word, src=peer, group=self._group)


class NcclCommunicator(DeviceCommunicator):
    """Communicator over NCCL, with an optional faster all-reduce of small tensors.

    Args:
        spec, device, timeout: As above.
        custom_all_reduce: Add small tensors without NCCL, if that works.
        unlinked_devices: Says why it would not pay between this rank's device and others; None for no such check.
        backend: Name of torch's backend; tests use another one than NCCL.
    """

    def __init__(
        self,
        spec: GroupSpec,
        device: torch.device,
        *,
        custom_all_reduce: bool = False,
        unlinked_devices: LinkCheck | None = None,
        backend: str = "nccl",
        timeout: float = 600.0,
    ) -> None:
        super().__init__(spec, device, backend=backend, advice=_ADVICE, timeout=timeout)
        self._small_sums: SmallAllReduce | None = None
        if custom_all_reduce:
            self._small_sums = self._create_if_all_ranks_can(device, unlinked_devices)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._small_sums is not None and self._small_sums.takes(tensor):
            return self._small_sums.all_reduce(tensor)
        return super().all_reduce(tensor)

    def close(self) -> None:
        if self._small_sums is not None:
            self._small_sums.close()
            self._small_sums = None
        super().close()

    def _create_if_all_ranks_can(
        self, device: torch.device, unlinked_devices: LinkCheck | None
    ) -> SmallAllReduce | None:
        """A SmallAllReduce if it works with correct sums on every rank; else None on all ranks."""
        devices = self._devices_of_ranks(device)
        problem = self._problem_of_hosts() or problem_of(devices, device, unlinked_devices)
        if not self._all(problem is None):
            # Common on machines without a direct connection between devices; not a fault.
            logger.info("NCCL adds small tensors, too: %s", problem or "another rank cannot read the others' memory.")
            return None
        found: SmallAllReduce | None = None
        try:
            found = _direct(self, device)
        except (RuntimeError, ImportError, AttributeError, TypeError, PlatformError) as e:
            logger.warning("NCCL adds small tensors, too: %s", str(e).partition("\n")[0])
        everywhere = self._all(found is not None)
        if found is None:
            return None
        if everywhere and self._sums_are_correct(found):
            return found
        if everywhere:
            logger.warning("NCCL adds small tensors, too: without it a test gave other results.")
        found.close()
        return None

    def _problem_of_hosts(self) -> str | None:
        """Why the ranks' memory cannot be mapped because they are on several machines, or None."""
        name = hashlib.sha256(platform.node().encode()).digest()
        mine = torch.frombuffer(bytearray(name[:4]), dtype=torch.uint8).to(self._device, torch.int32)
        names = super().all_gather(mine.unsqueeze(0), 0)
        return None if bool((names == mine).all()) else "The ranks are on several machines."

    def _devices_of_ranks(self, device: torch.device) -> list[int]:
        """The index of each rank's device."""
        index = torch.tensor([device.index or 0], dtype=torch.int32, device=self._device)
        return [int(each) for each in super().all_gather(index, 0).tolist()]

    def _sums_are_correct(self, sums: SmallAllReduce) -> bool:
        """Whether the results of `sums` are NCCL's, with equal bits on all ranks. All ranks call it together."""
        generator = torch.Generator(device="cpu").manual_seed(self.rank)
        for size in TRIAL_ELEMENTS:
            tensor = torch.randn(size, generator=generator).to(self._device, torch.bfloat16)
            if not sums.takes(tensor):
                continue
            expected = super().all_reduce(tensor.float())
            try:
                found = sums.all_reduce(tensor.clone())
            except (RuntimeError, AttributeError, TypeError) as e:
                logger.warning("A sum without NCCL has failed: %s", str(e).partition("\n")[0])
                found = torch.full_like(tensor, torch.nan)
            first = super().broadcast(found.clone())
            close = torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2)
            if not self._all(close and torch.equal(first, found)):
                return False
        return True

    def _all(self, value: bool) -> bool:
        """Whether `value` is true on every rank."""
        votes = super().all_reduce(torch.tensor([int(value)], dtype=torch.int32, device=self._device))
        return int(votes) == self.world_size


def _direct(communicator: NcclCommunicator, device: torch.device) -> SmallAllReduce:
    group = communicator._group
    assert group is not None
    return CustomAllReduce(group, device)
