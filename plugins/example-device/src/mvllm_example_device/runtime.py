"""ExampleRuntime: one device bound to this process, with memory, copies and checks of the contract's rules."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

import mvllm.plugin_api as api
from mvllm_example_device.faults import FaultPlan
from mvllm_example_device.plugin import LIBRARY
from mvllm_example_device.settings import Settings
from mvllm_example_device.strict import Strict, in_worker

logger = api.get_logger("mvllm.example_device")

_bound: list[ExampleRuntime] = []
"""The runtime that is open in this process, at most one."""


def _load_library(settings: Settings) -> None:
    """Registers the device with torch; once per process."""
    owner = torch._C._get_privateuse1_backend_name()
    if owner not in ("privateuseone", "example"):
        raise api.PlatformError(f"torch has one backend for third-party devices (PrivateUse1), and {owner!r} uses it.")
    if owner != "example":
        try:
            torch.ops.load_library(str(LIBRARY))
        except OSError as e:
            raise api.PlatformError(
                f"{LIBRARY} does not load into torch {torch.__version__}: {e}. It was compiled against another torch: "
                "reinstall mvllm-example-device."
            ) from e
        torch.utils.backend_registration.rename_privateuse1_backend("example")
        module = types.ModuleType("torch.example")  # only the functions that torch itself calls
        vars(module).update(
            is_available=lambda: True,
            device_count=lambda: settings.devices,
            current_device=lambda: 0,
            manual_seed_all=lambda seed: None,
            _is_in_bad_fork=lambda: False,
        )
        torch._register_device_module("example", module)
    torch.ops.mvllm_example_device.open(settings.devices, settings.memory)


class PendingCopy(Strict):
    """A copy to the host, made by another thread."""

    def __init__(self, runtime: ExampleRuntime, copy: Future[torch.Tensor]) -> None:
        self._runtime, self._copy = runtime, copy

    def wait(self) -> torch.Tensor:
        """Waits for the copy and returns the host tensor."""
        self._runtime.check()
        self._runtime.finish_lent_buffers()
        return self._copy.result()


class StepEvent(Strict, api.NullEvent):
    """An event behind copies to the device: when the host has waited for it, they are done."""

    def __init__(self, runtime: ExampleRuntime) -> None:
        self._runtime, self._lent = runtime, list[tuple[torch.Tensor, bytes]]()

    def record(self) -> None:
        self._lent = self._runtime.lent.copy()

    def synchronize(self) -> None:
        self._runtime.finish_lent_buffers(self._lent)


class ExampleRuntime(Strict, api.DeviceRuntime):
    """Runtime of the device `local_rank`. Public methods outside of the contract are for this package.

    Args:
        ctx: The worker.
        settings: The devices' settings.
        faults: The injected faults.
    """

    def __init__(self, ctx: api.WorkerContext, settings: Settings, faults: FaultPlan) -> None:
        in_worker()
        if _bound:
            raise api.PlatformError(
                f"This process has {_bound[0].device} open already: a process binds one device, once."
            )
        if ctx.local_rank >= settings.devices:
            raise api.PlatformError(
                f"Rank {ctx.rank} is worker {ctx.local_rank} of this machine, which has {settings.devices} devices. "
                "Use fewer workers, or raise MVLLM_EXAMPLE_DEVICES."
            )
        _load_library(settings)
        self._settings, self._faults = settings, faults
        self._process, self._thread = os.getpid(), None if ctx.in_engine_process else threading.get_ident()
        self.lent: list[tuple[torch.Tensor, bytes]] = []
        self._batch: api.BatchLayout | None = None
        self._compiled: set[Hashable] = set()
        self._warm, self._open = False, True
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="example-device-copies")
        self.device = torch.device("example", ctx.local_rank)
        _bound.append(self)
        self.seed(ctx.seed)

    # --- the contract

    def synchronize(self) -> None:
        self._end_step()

    def memory(self) -> api.MemoryInfo:
        self.check()
        total, used, peak = torch.ops.mvllm_example_device.memory(self.device.index)
        free = self._faults.free_memory(max(0, total - used))
        return api.MemoryInfo(total=total, free=free, used_by_me=used, peak_by_me=peak)

    def reset_peak_memory(self) -> None:
        self.check()
        torch.ops.mvllm_example_device.reset_peak(self.device.index)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.check()
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as e:
            raise MemoryError(f"A tensor of shape {shape} and {dtype}: {str(e).splitlines()[0]}") from e

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.check()
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        self.check()
        if host.device.type != "cpu":
            raise api.ContractError(f"to_device takes a tensor of the host, not of {host.device}.")
        self.lent.append((host, _bytes_of(host)))
        return host.to(self.device)

    def to_host(self, tensor: torch.Tensor) -> api.HostCopy:
        self.check()
        if tensor.device != self.device:
            raise api.ContractError(f"to_host takes a tensor of {self.device}, not of {tensor.device}.")
        source = tensor.detach().clone()  # later work may overwrite what was submitted before this copy
        return PendingCopy(self, self._copier.submit(source.cpu))

    def event(self) -> StepEvent:
        return StepEvent(self)

    def seed(self, seed: int) -> None:
        self.check()
        torch.manual_seed(seed)

    def step_mark(self) -> None:
        self._end_step()

    def end_warm_up(self) -> None:
        self.check()
        self._warm = True
        if self._settings.mode == "static":
            logger.info("%s: %d shapes compiled; any other is an error from now on.", self.device, len(self._compiled))

    def health(self) -> None:
        self.check()

    def shutdown(self) -> None:
        in_worker()
        if self._open:
            self._open = False
            self._copier.shutdown()
            self.lent.clear()
            _bound.remove(self)

    # --- for the rest of this package

    def check(self) -> None:
        """Checks that the call comes from this worker's process and thread, as the contract demands."""
        in_worker()
        if not self._open:
            raise api.ContractError(f"{self.device} was used after shutdown.")
        if os.getpid() != self._process:
            raise api.ContractError(f"{self.device} was opened by process {self._process} and used by {os.getpid()}.")
        if self._thread not in (None, threading.get_ident()):
            raise api.ContractError(f"{self.device} was used from another thread than the worker's.")

    def begin_step(self, batch: api.BatchLayout) -> None:
        """Starts a step with the first metadata that is built for it, and triggers its faults."""
        self.check()
        if self._batch is not None and batch.query_start_loc is self._batch.query_start_loc:
            return  # metadata of another group of layers
        if self._batch is not None and self._settings.mode == "lazy":
            raise api.ContractError("A step started before step_mark or synchronize ended the previous one.")
        self._batch = batch
        self.compile("step", batch.num_tokens, batch.num_requests, *batch.block_table_device.shape)
        if self._warm:
            self._faults.begin_step()
            if self._faults.starved:
                torch.ops.mvllm_example_device.open(self._settings.devices, self.memory().used_by_me)

    def compile(self, *shape: Hashable) -> None:
        """Counts a shape in mode `static`; raises for a new one after the warm-up."""
        if self._settings.mode != "static" or shape in self._compiled:
            return
        if self._warm:
            raise api.PlatformError(f"A step after the warm-up needed a compilation: {shape} is a new shape.")
        self._compiled.add(shape)

    def finish_lent_buffers(self, lent: list[tuple[torch.Tensor, bytes]] | None = None) -> None:
        """Marks copies to the device (all with None) as done, after checking that their sources have not changed."""
        done = {id(copy) for copy in (self.lent if lent is None else lent)}
        for host, content in (copy for copy in self.lent if id(copy) in done):
            if _bytes_of(host) != content:
                raise api.ContractError("A host tensor was changed before the copy of it to the device was done.")
        self.lent = [copy for copy in self.lent if id(copy) not in done]

    def _end_step(self) -> None:
        self.check()
        torch.ops.mvllm_example_device.open(self._settings.devices, self._settings.memory)  # ends the fault `oom`
        self._batch = None
        self.finish_lent_buffers()


def _bytes_of(host: torch.Tensor) -> bytes:
    return host.reshape(-1).view(torch.uint8).numpy().tobytes()
