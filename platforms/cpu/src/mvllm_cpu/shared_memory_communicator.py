"""Collectives between ranks of one machine through shared memory, which is faster than sockets.

All-reduces and all-gathers, which every layer needs, use shared memory; all other collectives are torch's. The memory
has no name: rank 0 creates it, the others open it through rank 0's /proc entry, and the system frees it when the last
rank ends. If that is not possible (other machines, other process namespaces), all ranks agree to use sockets.

`csrc/shared_sum.cpp` implements a round.
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
from mvllm_cpu import host_resources, kernels, recording

logger = get_logger("mvllm.cpu.communicator")

BUFFER_BYTES = 1 << 20
"""Maximum bytes of one rank per round. Larger all-reduces take several rounds; larger all-gathers use sockets."""

_WORD_BYTES = 64
_TOKEN_BYTES = 16
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_TIMEOUT_MS = 1000
"""Timeout of a wait, after which the process of the late rank is checked."""

_SPIN_NS = 100_000
"""Time that a wait spins before it sleeps: waking takes tens of microseconds, about as long as most waits."""


class SharedGroup(ctypes.Structure):
    """`SharedGroup` of csrc/shared_sum.cpp. It holds the only count of rounds, which replays advance as well.

    Attributes:
        memory: The memory at `base`; this reference keeps it alive.
    """

    memory: ctypes.c_char
    _fields_ = [
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("world_size", "buffer_bytes", "rank", "spin_ns", "timeout_ms", "done")),
        ("late", ctypes.c_int64),
        ("round", ctypes.c_uint32),
        ("is_posted", ctypes.c_int32),
    ]


class SharedMemoryCommunicator(TorchCommunicator):
    """A group of the CPU platform.

    Args:
        spec, device, timeout: As TorchCommunicator's.
        buffer_bytes: Bytes of one rank in one round.
    """

    def __init__(
        self, spec: GroupSpec, device: torch.device, *, timeout: float = 600.0, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        super().__init__(spec, device=device, backend="gloo", timeout=timeout)
        self._ranks = spec.ranks
        self._timeout = timeout
        self._buffer_bytes = buffer_bytes
        self._late_round, self._deadline = -1, 0.0
        self._memory, self._pids = self._create_or_map_memory()
        if self._memory is not None:
            self._bind(self._memory)

    @property
    def uses_shared_memory(self) -> bool:
        """Whether the ranks share memory."""
        return self._memory is not None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        code = _DTYPE_CODES.get(tensor.dtype)
        if self._memory is None or code is None:
            recording.refuse("ranks talk through sockets")
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        self._sum(self._shared_address, tensor.data_ptr(), tensor.numel(), code, None)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        recording.refuse("ranks talk to each other")
        if self._memory is None or not 0 < tensor.nbytes <= self._buffer_bytes:
            return super().all_gather(tensor, dim)
        tensor = tensor.contiguous()
        while not self._exchange(self._shared_address, tensor.data_ptr(), tensor.nbytes):
            self._check_late_rank()
        parts = [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._buffer(rank)).view(
                tensor.shape
            )
            for rank in range(self.world_size)
        ]
        gathered = torch.cat(parts, dim=dim)
        self._end_round(self._shared_address)
        return gathered

    def close(self) -> None:
        # The mapping is freed with its last view (of a recording, for example), at the latest with the process.
        self._memory = None
        super().close()

    def _check_late_rank(self) -> None:
        """Returns if the late rank may still arrive.

        Raises:
            PlatformError: It has died, or has not arrived within the timeout.
        """
        group = self._shared
        now = time.monotonic()
        if self._late_round != group.round:
            self._late_round, self._deadline = group.round, now - group.timeout_ms / 1000 + self._timeout
        pid, me = self._pids[group.late], self._ranks[self.rank]
        who = f"rank {self._ranks[group.late]} (pid {pid})"
        problem = ""
        if not _is_alive(pid):
            problem = f"{who} has died while rank {me} waited for its part of a sum."
        elif now > self._deadline:
            problem = f"{who} has not joined a collective for {self._timeout:.0f} s; rank {me} gave up."
        if problem:
            self._late_round, group.done, group.is_posted = -1, 0, 0
            raise PlatformError(problem)

    def _buffer(self, rank: int) -> int:
        return self.world_size * _WORD_BYTES + (2 * rank + (self._shared.round & 1)) * self._buffer_bytes

    def _bind(self, memory: mmap.mmap) -> None:
        library = kernels.load().library
        assert library is not None
        begin = ctypes.c_char.from_buffer(memory)
        # A rank that spins on a core that another rank needs delays that rank. Workers are bound to cores before they
        # connect, so the cores of all ranks together count.
        spin_ns = _SPIN_NS if host_resources.num_cores_of_processes(self._pids) >= self.world_size else 0
        self._shared = SharedGroup(
            *(ctypes.addressof(begin), self.world_size, self._buffer_bytes, self.rank), spin_ns, _TIMEOUT_MS
        )
        self._shared.memory = begin
        self._shared_address = ctypes.byref(self._shared)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._sum = recording.BlockingKernel(
            library,
            "mvllm_cpu_shared_all_reduce",
            (pointer, pointer, number, ctypes.c_int32, pointer),
            ahead=4,
            check_peers=self._check_late_rank,
        )
        self._exchange = library.mvllm_cpu_shared_exchange
        self._exchange.argtypes, self._exchange.restype = (pointer, pointer, number), ctypes.c_int
        self._end_round = library.mvllm_cpu_shared_end_round
        self._end_round.argtypes, self._end_round.restype = (pointer,), None

    def _create_or_map_memory(self) -> tuple[mmap.mmap | None, list[int]]:
        """The shared memory, or None if a rank cannot map it; and all process ids. All ranks call it together."""
        size = self.world_size * (_WORD_BYTES + 2 * self._buffer_bytes) + _TOKEN_BYTES
        can_share = hasattr(os, "memfd_create") and hasattr(kernels.load().library, "mvllm_cpu_shared_exchange")
        fd, token = -1, secrets.token_bytes(_TOKEN_BYTES)
        if self.rank == 0 and can_share:
            fd = _create_memory(size, token)
            can_share = fd >= 0
        info = torch.tensor([can_share, os.getpid(), fd, *token], dtype=torch.int64)
        infos = super().all_gather(info.view(1, -1), dim=0)
        pids = infos[:, 1].tolist()
        memory = None
        try:
            if bool(infos[:, 0].all()):
                memory = _map_memory(fd, pids[0], int(infos[0, 2]), size, bytes(infos[0, 3:].tolist()))
            found = super().all_reduce(torch.tensor([memory is not None], dtype=torch.int64))
        finally:
            if fd >= 0:
                os.close(fd)  # the mappings keep the memory
        if int(found) < self.world_size:
            logger.info("The ranks of group %s share no memory; they talk through sockets.", self._ranks)
            memory = None
        return memory, pids


def _create_memory(size: int, token: bytes) -> int:
    """Allocates `size` bytes of memory that end with `token`; returns the descriptor, or -1 without enough memory.

    All pages are allocated now, because the system would kill a rank if a later first access found no memory.
    """
    free = host_resources.memory_free()
    if size > free // 2:  # a control group kills processes that exceed its limit
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
    with contextlib.suppress(OSError):  # prevents other processes from shrinking mapped memory
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _map_memory(own_fd: int, pid: int, fd: int, size: int, token: bytes) -> mmap.mmap | None:
    """Maps rank 0's memory; None if it is not reachable, or process `pid` here is not rank 0 (other machines)."""
    opened = -1
    try:
        opened = os.dup(own_fd) if own_fd >= 0 else os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
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
