"""One device with torch_xla's lazy tensors, bound to a worker.

An operation is only added to a graph. `torch_xla.sync` ends the graph: it becomes one program, which is compiled if no
program with these operations and shapes exists, and runs while the host continues.

    host     record, record, sync ── record, record, sync ──────── wait
    device                       [ program           ][ program   ]

Reading a single tensor would run its part of the graph alone, and again at the next sync, so every read by the host
ends the graph first. A tensor that is written in place reuses its buffer (XLA's donation), so the KV cache exists once.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr

from mvllm.plugin_api import (
    DeviceRuntime,
    FinishedHostCopy,
    HostCopy,
    MemoryInfo,
    PlatformError,
    WorkerContext,
    get_logger,
)
from mvllm_tpu import compile_cache, host_memory, xla_devices

logger = get_logger("mvllm.tpu.runtime")

_NAN_FLAG = "xla_cpu_enable_fast_min_max"


class LazyRuntime(DeviceRuntime):
    """Runtime of the device that this process opens.

    Raises:
        PlatformError: XLA opens no device.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        try:
            find_nan_as_tpus_do()
            compile_cache.enable()
            self.device = torch_xla.device()
            self._kind = xr.device_type()
        except (RuntimeError, ValueError) as e:
            variables = {name: value for name, value in os.environ.items() if name.startswith(("PJRT_", "TPU_"))}
            raise PlatformError(
                f"XLA opens no device for rank {ctx.rank}: {str(e).splitlines()[0]}. Variables: {variables}. Run: "
                "mvllm doctor --platform tpu"
            ) from e
        self._peak_before = 0
        self._warm_compilations: int | None = None
        self._open = True
        self.seed(ctx.seed)

    @property
    def on_host(self) -> bool:
        """Whether this is XLA's CPU device."""
        return self._kind == "CPU"

    def synchronize(self) -> None:
        torch_xla.sync(wait=True)
        xm.wait_device_ops()

    def memory(self) -> MemoryInfo:
        torch_xla.sync(wait=True)
        if self.on_host:
            used, peak = host_memory.resident()
            return MemoryInfo(host_memory.total(), host_memory.free(), used, peak)
        found = xm.get_memory_info(self.device)
        used, limit, most = (int(found[name]) for name in ("bytes_used", "bytes_limit", "peak_bytes_used"))
        peak = most if most > self._peak_before else used  # the device's peak cannot be reset
        return MemoryInfo(limit, limit - used, used, max(peak, used))

    def reset_peak_memory(self) -> None:
        torch_xla.sync(wait=True)
        if self.on_host:
            host_memory.reset_peak()
        else:
            self._peak_before = int(xm.get_memory_info(self.device)["peak_bytes_used"])

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        require_room(math.prod(shape) * dtype.itemsize, self.device, f"A tensor of {list(shape)}, {dtype},")
        made = torch.zeros(shape, dtype=dtype, device=self.device)
        torch_xla.sync(wait=True)
        return made

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device)  # keeps a copy until it is sent at the next sync

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        torch_xla.sync()
        return FinishedHostCopy(tensor.cpu())  # copied now, because later work may write to the same buffer

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        xm.set_rng_state(seed, str(self.device))

    def inference_mode(self) -> AbstractContextManager[object]:
        return torch.no_grad()  # in inference mode, views of lazy tensors from outside are not allowed

    def step_mark(self) -> None:
        torch_xla.sync()

    def health(self) -> None:
        try:
            torch_xla.sync(wait=True)
        except RuntimeError as e:
            raise PlatformError(f"The device {self.device} does not answer: {str(e).splitlines()[0]}.") from e

    def shutdown(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            torch_xla.sync(wait=True)
        except RuntimeError as e:  # the device has failed
            logger.warning("Shutdown of the device %s failed: %s", self.device, str(e).splitlines()[0])

    def num_compilations(self) -> int:
        return num_compilations()


def find_nan_as_tpus_do() -> None:
    """Makes maxima on XLA's CPU device return NaN if an element is NaN, as on TPUs. Call it before XLA starts."""
    if xla_devices.find().on_host and _NAN_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_NAN_FLAG}=false".strip()


def num_compilations() -> int:
    """Number of programs that XLA has compiled in this process, from its counter."""
    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


def require_room(size: int, device: torch.device, what: str) -> None:
    """Checks for free memory before an allocation, because the host's system would kill the process.

    Raises:
        MemoryError: There are fewer free bytes than `size`.
    """
    if xr.device_type() == "CPU":
        free = host_memory.free()
    elif xr.is_spmd():  # XLA has no statistics in SPMD mode; it raises its own error
        return
    else:
        found = xm.get_memory_info(device)
        free = int(found["bytes_limit"]) - int(found["bytes_used"])
    if size > free:
        raise MemoryError(f"{what} takes {size / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free on {device}.")
