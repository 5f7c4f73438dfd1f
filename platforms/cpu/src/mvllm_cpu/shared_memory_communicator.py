"""Collectives between ranks of one machine through shared memory, where sockets would take most of the time.

Sums and gathers, which every layer needs, go through memory; everything else is torch's. The memory has no name: rank
0 makes it, the others open it through rank 0's process, and it is gone with the last of them, however they end. Where
that does not work (other machines, other process namespaces) all ranks notice together and stay with sockets.

The compiled half, `csrc/shared_sum.cpp`, says how a round works.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import time

import torch

from mvllm.plugin_api import GroupSpec, PlatformError, TorchCommunicator, get_logger
from mvllm_cpu import kernels, machine, recording

logger = get_logger("mvllm.cpu.communicator")

SLOT_BYTES = 1 << 20
"""Most bytes of one rank in one round. Longer sums take several rounds; longer gathers go through sockets."""

_WORD_BYTES = 64
_TOKEN_BYTES = 16
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_PATIENCE_MS = 1000
_SPINS = 2000


class SharedMemoryCommunicator(TorchCommunicator):
    """A group of the CPU platform.

    Args:
        spec, device, timeout: As TorchCommunicator's.
        slot_bytes: Room for one rank in one round.
    """

    def __init__(
        self, spec: GroupSpec, device: torch.device, *, timeout: float = 600.0, slot_bytes: int = SLOT_BYTES
    ) -> None:
        super().__init__(spec, device=device, backend="gloo", timeout=timeout)
        self._ranks = spec.ranks
        self._timeout = timeout
        self._slot_bytes = slot_bytes
        self._round = 0
        # A rank that spins for a core that the others need keeps them from arriving.
        self._spins = _SPINS if machine.usable_threads() >= self.world_size else 0
        self._memory, self._pids = self._share()
        if self._memory is not None:
            self._bind(self._memory)

    @property
    def uses_shared_memory(self) -> bool:
        """Whether the ranks have found a common memory."""
        return self._memory is not None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        code = _DTYPE_CODES.get(tensor.dtype)
        if self._memory is None or code is None:
            recording.refuse("ranks talk through sockets")
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        count, size = tensor.numel(), tensor.itemsize
        recording.call_host(
            lambda address, ahead: self._sum_in_place(address, ahead, count, size, code), tensor.data_ptr()
        )
        return tensor

    def _sum_in_place(self, address: int, ahead: int, count: int, item_bytes: int, code: int) -> None:
        at_once = self._slot_bytes // item_bytes
        for start in range(0, count, at_once):
            part, length = address + start * item_bytes, min(at_once, count - start)
            self._exchange(part, length * item_bytes, ahead)
            self._sum(*self._place, self._round, part, length, code)
            self._round = (self._round + 1) & 0xFFFFFFFF

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        recording.refuse("ranks talk to each other")
        if self._memory is None or not 0 < tensor.nbytes <= self._slot_bytes:
            return super().all_gather(tensor, dim)
        tensor = tensor.contiguous()
        self._exchange(tensor.data_ptr(), tensor.nbytes)
        parts = [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._slot(rank)).view(
                tensor.shape
            )
            for rank in range(self.world_size)
        ]
        gathered = torch.cat(parts, dim=dim)
        self._round = (self._round + 1) & 0xFFFFFFFF
        return gathered

    def close(self) -> None:
        # The mapping goes with its last view, at the latest with the process.
        self._memory = None
        super().close()

    def _exchange(self, address: int, num_bytes: int, ahead: int = 0) -> None:
        """Shows the others `num_bytes` of this rank, and returns when all have shown theirs.

        Meanwhile it fetches what lies at `ahead`, unless that is 0.

        Raises:
            PlatformError: A rank has died, or has not come within the timeout.
        """
        self._post(*self._place, self.rank, self._round, address, num_bytes)
        base, world_size, slot_bytes = self._place
        deadline = time.monotonic() + self._timeout
        while True:
            late = self._wait(base, world_size, slot_bytes, self._round, self._spins, _PATIENCE_MS, ahead)
            if late < 0:
                return
            who = f"rank {self._ranks[late]} (pid {self._pids[late]})"
            if not _is_alive(self._pids[late]):
                raise PlatformError(f"{who} has died while rank {self._ranks[self.rank]} waited for its part of a sum.")
            if time.monotonic() > deadline:
                me = self._ranks[self.rank]
                raise PlatformError(f"{who} has not joined a collective for {self._timeout:.0f} s; rank {me} gave up.")

    def _slot(self, rank: int) -> int:
        return self.world_size * _WORD_BYTES + (2 * rank + (self._round & 1)) * self._slot_bytes

    def _bind(self, memory: mmap.mmap) -> None:
        library = kernels.load().library
        assert library is not None
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._place = (base, self.world_size, self._slot_bytes)
        pointer, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
        place = (pointer, number, number)
        self._post = library.mvllm_cpu_shared_post
        self._post.argtypes, self._post.restype = (*place, number, word, pointer, number), None
        self._wait = library.mvllm_cpu_shared_wait
        self._wait.argtypes, self._wait.restype = (*place, word, number, number, pointer), number
        self._sum = library.mvllm_cpu_shared_sum
        self._sum.argtypes, self._sum.restype = (*place, word, pointer, number, ctypes.c_int32), None

    def _share(self) -> tuple[mmap.mmap | None, list[int]]:
        """The memory, if every rank has it, and the ranks' process ids. All ranks call it together."""
        size = self.world_size * (_WORD_BYTES + 2 * self._slot_bytes) + _TOKEN_BYTES
        able = hasattr(os, "memfd_create") and hasattr(kernels.load().library, "mvllm_cpu_shared_wait")
        fd, token = -1, secrets.token_bytes(_TOKEN_BYTES)
        if self.rank == 0 and able:
            fd = _claim(size, token)
            able = fd >= 0
        mine = torch.tensor([able, os.getpid(), fd, *token], dtype=torch.int64)
        everyone = super().all_gather(mine.view(1, -1), dim=0)
        pids = everyone[:, 1].tolist()
        memory = None
        try:
            if bool(everyone[:, 0].all()):
                memory = _open(fd, pids[0], int(everyone[0, 2]), size, bytes(everyone[0, 3:].tolist()))
            found = super().all_reduce(torch.tensor([memory is not None], dtype=torch.int64))
        finally:
            if fd >= 0:
                os.close(fd)  # the mappings keep the memory
        if int(found) < self.world_size:
            logger.info("The ranks of group %s share no memory; they talk through sockets.", self._ranks)
            memory = None
        return memory, pids


def _claim(size: int, token: bytes) -> int:
    """A descriptor of `size` bytes of memory that end with `token`, or -1 where they cannot be had.

    Every page is claimed now: a rank that runs out of memory later, in the middle of a sum, would be killed for it.
    """
    free = machine.memory_free()
    if size > free // 2:  # a control group does not refuse memory beyond its limit: it kills
        logger.warning("Ranks talk through sockets: shared memory takes %d bytes, and %d are free.", size, free)
        return -1
    fd = -1
    try:
        fd = os.memfd_create("mvllm-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, token, size - _TOKEN_BYTES)
    except OSError as e:
        logger.warning("Ranks talk through sockets: %d bytes of shared memory cannot be had: %s", size, e)
        if fd >= 0:
            os.close(fd)
        return -1
    with contextlib.suppress(OSError):  # nobody can take back pages that others have mapped
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _open(own: int, pid: int, fd: int, size: int, token: bytes) -> mmap.mmap | None:
    """Maps rank 0's memory; None where it cannot be reached, or is not the one (another machine's process `pid`)."""
    opened = -1
    try:
        opened = os.dup(own) if own >= 0 else os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        if os.fstat(opened).st_size != size:
            return None
        memory = mmap.mmap(opened, size)
        return memory if memory[-len(token) :] == token else None
    except OSError as e:
        logger.debug("Memory of process %d cannot be mapped: %s", pid, e)
        return None
    finally:
        if opened >= 0:
            os.close(opened)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
