"""A platform whose worker drives several devices: separate parts of the host's memory.

A weight that core has placed is a `ShardedTensor`, which stores only its devices' shards. Products and lookups compute
shard by shard, as devices would, including the communication between them. Any other operation on a sharded tensor
gathers it, and is recorded in `GATHERED`. The KV cache is sharded by heads.

Enabled with SEVERAL_DEVICES, the number of devices per worker. `SEVERAL_DEVICES_FAULT` injects one fault that the
conformance clauses detect.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    BatchLayout,
    Capabilities,
    Communicator,
    DeviceRuntime,
    EngineConfig,
    FinishedHostCopy,
    GroupSpec,
    HostCopy,
    KVLayout,
    LaunchTopology,
    MemoryInfo,
    ParallelConfig,
    Plan,
    Platform,
    PlatformSpec,
    ReferenceAttention,
    Refusals,
    TorchCommunicator,
    WorkerContext,
)
from tests.helpers.multi_device_plugin import FAULT, SPEC, VARIABLE

MEMORY_BYTES = 16 << 20
"""Memory of one device."""

GATHERED: list[str] = []
"""Operations that needed a sharded tensor as a whole."""

HELD: dict[int, int] = {}
"""Bytes of each live shard, by its number."""


def fault() -> str:
    return os.environ.get(FAULT, "")


class ShardedTensor(torch.Tensor):
    """A tensor sharded over several devices.

    Attributes:
        parts: The tensor of each device.
        cut: The sharded dimension; None if replicated.
    """

    parts: tuple[torch.Tensor, ...]
    cut: int | None

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor], cut: int | None) -> ShardedTensor:
        shape = list(parts[0].shape)
        if cut is not None:
            shape[cut] = sum(part.shape[cut] for part in parts)
        made: ShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=parts[0].dtype, device=parts[0].device
        )
        made.parts, made.cut = tuple(parts), cut
        return made

    @property
    def whole(self) -> torch.Tensor:
        return self.parts[0] if self.cut is None else torch.cat(self.parts, self.cut)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_PARTS:
                return _OF_PARTS[func](*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            if name in _OF_SHAPE:
                return func(*args, **kwargs)
        return func(*_whole(args, name), **{key: _whole(value, name) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("aten.detach"):
            return _detach(args[0])
        return func(*_whole(args, name), **{key: _whole(value, name) for key, value in (kwargs or {}).items()})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Spread({[tuple(part.shape) for part in self.parts]}, cut={self.cut})"


def _whole(value: Any, name: str) -> Any:
    if isinstance(value, ShardedTensor):
        if value.cut is not None:
            GATHERED.append(name)
        return value.whole
    if isinstance(value, tuple | list):
        return type(value)(_whole(v, name) for v in value)
    return value


def _detach(tensor: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(tensor.parts, tensor.cut)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, ShardedTensor) or weight.cut is None:
        whole = [t.whole if isinstance(t, ShardedTensor) else t for t in (x, weight, bias)]
        return F.linear(*whole)  # type: ignore[arg-type]
    if weight.cut == 0:
        assert bias is None or (isinstance(bias, ShardedTensor) and bias.cut == 0), "each device adds what it has"
        biases = [None] * len(weight.parts) if bias is None else list(bias.parts)  # type: ignore[attr-defined]
        return torch.cat([F.linear(x, w, b) for w, b in zip(weight.parts, biases, strict=True)], dim=-1)
    inputs = x.chunk(len(weight.parts), dim=-1)
    total = F.linear(inputs[0], weight.parts[0])
    for part, w in zip(inputs[1:], weight.parts[1:], strict=True):
        total = total + F.linear(part, w)
    return total if bias is None else total + (bias.whole if isinstance(bias, ShardedTensor) else bias)


def _embedding(ids: torch.Tensor, weight: ShardedTensor, *_: Any, **__: Any) -> torch.Tensor:
    if weight.cut is None:
        return F.embedding(ids, weight.parts[0])
    assert weight.cut == 0
    total, first = None, 0
    for part in weight.parts:
        local = ids - first
        here = (local >= 0) & (local < len(part))
        found = F.embedding(local.where(here, 0), part).masked_fill_(~here.unsqueeze(-1), 0)
        total, first = found if total is None else total + found, first + len(part)
    assert total is not None
    return total


def _getitem(tensor: ShardedTensor, index: Any) -> torch.Tensor:
    if isinstance(index, int) and tensor.cut == 0:  # an expert is on one device
        per_device = len(tensor.parts[0])
        return tensor.parts[index // per_device][index % per_device]
    if tensor.cut is not None:
        GATHERED.append("getitem")
    return tensor.whole[index]


_OF_PARTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.detach: _detach,
}


_OF_SHAPE = {"__get__", "__set__", "requires_grad_", "__hash__", "dim", "size", "stride", "numel", "element_size"}
"""Attributes of a tensor that need no values."""


def count_part(tensor: torch.Tensor) -> torch.Tensor:
    """Counts a live shard."""
    number = id(tensor)
    HELD[number] = tensor.numel() * tensor.element_size()
    weakref.finalize(tensor, HELD.pop, number, None)
    return tensor


class MultiDeviceRuntime(DeviceRuntime):
    """Runtime of all devices of one worker."""

    def __init__(self, num_devices: int) -> None:
        self.device = torch.device("cpu")
        self.num_devices = num_devices

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        total = (1 if fault() == "memory" else self.num_devices) * MEMORY_BYTES
        used = sum(HELD.values())
        return MemoryInfo(total=total, free=max(0, total - used), used_by_me=used, peak_by_me=used)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return FinishedHostCopy(tensor.whole if isinstance(tensor, ShardedTensor) else tensor)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def place(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        if fault() == "place":
            return tensor
        large = tensor.shape != (24, 48)  # different from the case that the clause about tensors tests
        if dim is None or fault() == "copies" or (fault() == "weights" and large):
            return ShardedTensor([count_part(tensor.clone()) for _ in range(self.num_devices)], None)
        assert tensor.shape[dim] % self.num_devices == 0, f"{tuple(tensor.shape)} is not cut evenly along {dim}"
        parts = [count_part(part.clone()) for part in tensor.chunk(self.num_devices, dim)]
        return ShardedTensor(parts[::-1] if fault() == "order" else parts, dim)

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if isinstance(tensor, ShardedTensor):
            return tensor.parts
        nothing = tensor.new_empty(0)  # unplaced tensors are on the first device
        return [tensor, *(nothing for _ in range(self.num_devices - 1))]


class MultiDeviceAttention(AttentionBackend):
    """Reference attention, on each device for its shard of the heads."""

    def __init__(self, spec: AttentionSpec, num_devices: int) -> None:
        super().__init__(spec)
        self._shares_kv = spec.num_kv_heads % num_devices == 0
        kv_heads = spec.num_kv_heads // num_devices if self._shares_kv else spec.num_kv_heads
        own = replace(spec, num_heads=spec.num_heads // num_devices, num_kv_heads=kv_heads)
        self._devices = [ReferenceAttention(own) for _ in range(num_devices)]

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        return ReferenceAttention.validate(spec)

    def kv_layout(self) -> KVLayout:
        layouts = [device.kv_layout() for device in self._devices]
        return KVLayout(layouts[0].block_sizes, sum(layout.bytes_per_token for layout in layouts))

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Any:
        """The reference's cache, with each tensor sharded by heads."""
        made = [each.allocate(num_blocks, block_size, device) for each in self._devices]
        tensors = [[cache] if isinstance(cache, torch.Tensor) else list(cache) for cache in made]
        size = self.spec.kv_dtype in ("int8", "fp8")
        cut = [tensors[0][i].dim() - (1 if size and i >= len(tensors[0]) // 2 else 2) for i in range(len(tensors[0]))]
        return [
            ShardedTensor([count_part(t) for t in same], at if self._shares_kv else None)
            for same, at in zip(zip(*tensors, strict=True), cut, strict=True)
        ]

    def build_metadata(self, batch: BatchLayout) -> Any:
        return self._devices[0].build_metadata(batch)

    def write_kv(self, kv: Any, key: torch.Tensor, value: torch.Tensor, metadata: Any) -> None:
        for i, (device, k, v) in enumerate(zip(self._devices, self._of_kv(key), self._of_kv(value), strict=True)):
            device.write_kv(self._cache(kv, i), k, v, metadata)

    def forward(self, query: torch.Tensor, kv: Any, metadata: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        count = len(self._devices)
        own_sinks = (
            [None] * count if sinks is None else list(sinks.parts if isinstance(sinks, ShardedTensor) else [sinks])
        )
        found = [
            device.forward(q, self._cache(kv, i), metadata, s)
            for i, (device, q, s) in enumerate(
                zip(self._devices, query.chunk(count, dim=1), own_sinks, strict=True),
            )
        ]
        return torch.cat(found, dim=-1)

    def copy_blocks(self, kv: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
        for i, device in enumerate(self._devices):
            device.copy_blocks(self._cache(kv, i), source, destination)

    def _of_kv(self, heads: torch.Tensor) -> Iterator[torch.Tensor]:
        count = len(self._devices)
        return iter(heads.chunk(count, dim=1) if self._shares_kv else [heads] * count)

    @staticmethod
    def _cache(kv: Any, device: int) -> Any:
        own = [tensor.parts[device] for tensor in kv]
        return own[0] if len(own) == 1 and own[0].dim() == 5 else own


class MultiDevicePlatform(Platform):
    """The platform `several`; see the module."""

    _num_devices = 1

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=("float32", "bfloat16"),
            kv_dtypes=("float32", "bfloat16", "int8", "fp8"),
            devices_per_process=None,
            collectives=frozenset({"all_reduce", "all_gather", "broadcast", "send_recv", "barrier"}),
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            mla=True,
        )

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        return Plan()

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        devices = min(int(os.environ[VARIABLE]), parallel.world_size)
        workers = -(-parallel.world_size // devices)
        executors = ("mp", "external_launcher") if workers > 1 else ("uni", "mp", "external_launcher")
        return LaunchTopology(workers, devices, executors)

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        MultiDevicePlatform._num_devices = ctx.num_devices
        return MultiDeviceRuntime(ctx.num_devices)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        return TorchCommunicator(group, device=device, backend="gloo")

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        # A device sees all heads if it is configured to ignore the others.
        count = 1 if fault() == "cache" else self._num_devices
        return ReferenceAttention(spec) if count == 1 else MultiDeviceAttention(spec, count)
