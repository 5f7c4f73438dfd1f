"""Several devices of one worker: torch_xla's SPMD mode, in which a tensor is distributed over a device mesh.

The process has one virtual device. A tensor on it is sharded over the devices or, by default, replicated on all of
them. Programs are written as for one device: XLA partitions the work by the sharding of weights and KV cache, and
inserts the collectives.

    weight [8, 4], place(0)      device 0: rows 0-3      device 1: rows 4-7
    step's inputs, norms         replicated
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from mvllm.plugin_api import AttentionSpec, KVLayout, MemoryInfo, PlatformError, WorkerContext
from mvllm_tpu.attention import Cache
from mvllm_tpu.lazy_runtime import LazyRuntime
from mvllm_tpu.runtimes.lazy_attention import LazyAttention
from mvllm_tpu.xla_devices import NUM_CPUS_VARIABLE

_AXIS = "devices"
_HEADS = 2
"""The sharded dimension of a KV cache's tensors."""


class SpmdRuntime(LazyRuntime):
    """Runtime of all devices that this process sees.

    Raises:
        PlatformError: Their number is not the worker's number of devices, or XLA opens none.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        try:
            xr.use_spmd()
        except RuntimeError as e:
            raise PlatformError(f"XLA does not spread tensors over devices: {str(e).splitlines()[0]}.") from e
        super().__init__(ctx)
        found = xr.global_runtime_device_count()
        if found != ctx.num_devices:
            raise PlatformError(
                f"This worker is to drive {ctx.num_devices} devices, but XLA shows it {found}. Each worker drives "
                "tensor_parallel_size devices: set that to their number, or limit what the process sees with "
                f"{NUM_CPUS_VARIABLE} (XLA's CPU device), or set --distributed-executor-backend mp, whose workers are "
                "new processes."
            )
        self._mesh = mesh(ctx.num_devices)

    def memory(self) -> MemoryInfo:
        if not self.on_host:
            raise PlatformError(
                "torch_xla keeps no figures of memory while one worker drives several devices. Set "
                "--kv-cache-memory-bytes, which counts the bytes of all devices together."
            )
        return super().memory()

    def reset_peak_memory(self) -> None:
        if self.on_host:
            super().reset_peak_memory()

    def place(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        torch_xla.sync(wait=True)  # lazy tensors, such as transposed weights, have no memory yet
        shard_tensor(tensor, self._mesh, dim)
        torch_xla.sync()  # at once, so that at most one layer's unsharded weights are on a device
        return tensor

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        torch_xla.sync(wait=True)
        [shards] = torch_xla._XLAC._get_local_shards([tensor])
        return [shard.cpu() for shard, _ in shards]


class SpmdAttention(LazyAttention):
    """LazyAttention with a cache sharded by heads; replicated if their number is not divisible by the devices.

    Args:
        spec: The layer, with the heads of all devices.
        num_devices: Number of devices.
    """

    def __init__(self, spec: AttentionSpec, num_devices: int) -> None:
        super().__init__(spec)
        self._num_devices = num_devices
        self._is_shared = spec.num_kv_heads % num_devices == 0

    def kv_layout(self) -> KVLayout:
        layout = super().kv_layout()
        copies = 1 if self._is_shared else self._num_devices
        return KVLayout(layout.block_sizes, copies * layout.bytes_per_token)

    def place(self, caches: Cache) -> None:
        for cache in caches:
            shard_tensor(cache, mesh(self._num_devices), _HEADS if self._is_shared else None)


def mesh(num_devices: int) -> xs.Mesh:
    """One-dimensional mesh of the devices."""
    return xs.Mesh(np.arange(num_devices), (num_devices,), (_AXIS,))


def shard_tensor(tensor: torch.Tensor, over: xs.Mesh, dim: int | None) -> None:
    """Shards a tensor along `dim`, or replicates it, in place."""
    xs.mark_sharding(tensor, over, tuple(_AXIS if dim is not None and i == dim else None for i in range(tensor.dim())))
