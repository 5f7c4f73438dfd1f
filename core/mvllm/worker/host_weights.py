"""The weights of a sleeping worker, in host memory.

Sleep level 1 copies each storage that a weight is in to the host and frees it on the device; `wake_up` allocates the
storages again and copies the bytes back. Storages rather than tensors, so that whatever shares one still does: views,
tied weights, the packed and quantized forms that operations keep. Their addresses change, so compiled and captured
steps have to be dropped before.

    device   [  a  ][    b    ][ c ]
    host     [  a  |  b ][  b  | c ]     buffers of equal size: allocators of page-locked memory round sizes up
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.platform.attention import AttentionBackend
from mvllm.platform.communicator import Communicator
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.state import StateBackend
from mvllm.worker.out_of_memory import out_of_memory_as

_BUFFER_BYTES = 1 << 26

_WITHOUT_WEIGHTS = (
    BuildContext,
    GroupCoordinator,
    Communicator,
    DeviceRuntime,
    Platform,
    AttentionBackend,
    StateBackend,
    torch.dtype,
    torch.device,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
)
"""Objects whose memory stays: other ranks or a library may know its address."""


class HostWeights:
    """A copy of the device's storages that some objects refer to.

    Args:
        owners: The models and what belongs to them: modules, and any objects that they refer to.
        runtime: The device.
        caches: KV caches and states that layers refer to: they are not weights.

    Attributes:
        num_bytes: Bytes of the storages.
    """

    def __init__(self, owners: Iterable[object], runtime: DeviceRuntime, caches: Iterable[object] = ()) -> None:
        self._runtime = runtime
        left_out = {storage._cdata for storage in storages_of(caches, runtime.device)}
        found = [storage for storage in storages_of(owners, runtime.device) if storage._cdata not in left_out]
        self._storages = [(storage, storage.nbytes()) for storage in found]
        self._buffers: list[torch.Tensor] = []
        self.num_bytes = sum(size for _, size in self._storages)

    def offload(self) -> None:
        """Copies the storages to the host, and frees them on the device.

        Raises:
            ModelError: The host has no memory for the copy. The storages stay.
        """
        try:
            with out_of_memory_as(ModelError, f"{self.num_bytes:,} bytes for the weights", _LEVEL_2, where="host"):
                for start in range(0, self.num_bytes, _BUFFER_BYTES):
                    size = min(_BUFFER_BYTES, self.num_bytes - start)
                    self._buffers.append(self._runtime.host_buffer((size,), torch.uint8))
        except BaseException:
            self._buffers.clear()
            raise
        for on_device, on_host in self._pieces():
            on_host.copy_(on_device, non_blocking=True)
        self._runtime.synchronize()
        self._free_storages()

    def restore(self) -> None:
        """Allocates the storages again, and copies the weights back.

        Raises:
            ModelError: The device has no memory for them. The copy on the host stays.
        """
        try:
            with out_of_memory_as(ModelError, "The weights", "Free memory on the device, and wake up again."):
                for storage, size in self._storages:
                    storage.resize_(size)
                for on_device, on_host in self._pieces():
                    on_device.copy_(on_host, non_blocking=True)
                self._runtime.synchronize()
        except BaseException:
            self._free_storages()
            raise
        self._buffers.clear()

    def _free_storages(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of all storages, and their places in the buffers: uint8 tensors of the device and of the host."""
        place = 0
        for storage, size in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=self._runtime.device).set_(storage, 0, (size,), (1,))
            start = 0
            while start < size:
                index, offset = divmod(place, _BUFFER_BYTES)
                stop = min(size, start + _BUFFER_BYTES - offset)
                yield whole[start:stop], self._buffers[index][offset : offset + stop - start]
                place += stop - start
                start = stop


_LEVEL_2 = "Use level 2, which drops the weights and reads the checkpoint again, or free memory on the host."


def storages_of(owners: Iterable[object], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages on a device that objects refer to, each once.

    Follows attributes, containers, and the variables of functions: operations keep prepared weights there. A storage
    that cannot be resized, because torch has not allocated it, is left out.
    """
    found: dict[int, torch.UntypedStorage] = {}
    seen: dict[int, object] = {}  # keeps the objects alive, so that no two have one id
    ahead = deque(owners)
    while ahead:
        each = ahead.popleft()
        if each is None or id(each) in seen or isinstance(each, _WITHOUT_WEIGHTS):
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor) and each.device == device and each.layout is torch.strided:
            storage = each.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[storage._cdata] = storage
        ahead.extend(_references(each))
    return list(found.values())


def _references(thing: Any) -> Iterator[Any]:
    """The objects that one object refers to."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from (thing.__defaults__, thing.__kwdefaults__)
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            yield getattr(thing, name, None)
    yield getattr(thing, "__dict__", None)
