"""The CUDA platform over the software device of plugins/example-device: its tensors are not tensors of the host.

The hosted platforms (hosted_platform.py, tests/gpu/host_platforms.py) have the host as their device, and there any mix
of tensors of the host and of the device works. Here it is an error, as on a GPU:

    torch's operations   refuse tensors of the host among those of the device (csrc/device.cpp); 0-dimensional tensors
                         of the host may take part, as with CUDA
    numpy, memoryview    cannot read a tensor of the device
    kernels              run on Triton's interpreter. A launch with a tensor of the host fails; on a GPU it would
                         read an address that the device does not have

of the platform     real, or replaced by
runtime             TorchGpuRuntime, with `SoftwareModule` in place of torch.cuda. Copies are done when a call returns
attention, ops      real; libraries are not installed
CUDA graphs         graphs of torch's operations (host_graphs.py of torch-gpu's tests) and of launches
page-locked memory  plain memory of the host: torch page-locks memory only for a device whose library does, and this
                    one's does not. So `pin_memory`, and `record_stream` for which torch needs a stream of that library,
                    do nothing in this process (`ignore_pinning`)

Not covered:

- NCCL and the custom all-reduce: they need the driver. One device only.
- cuDNN, FlashInfer, FlashAttention: their functions exist for CUDA tensors only.
- The choice between torch's and Triton's product of few rows: it measures time on a device (AutotunedLinear). Tests
  select one with MVLLM_CUDA_LINEAR.
- Reads of a device's tensor by `item()` and `tolist()`: they are legal, and wait. In captured steps `HostGraphs` finds
  them.
- Order: nothing is asynchronous, so a missing wait is not seen. The platform `example` checks host buffers.

A process has one PrivateUse1 backend and cannot give it back, so tests run this platform in processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable
from typing import Any, ClassVar

import platforms.cuda.tests.interpreted  # noqa: F401  # before anything else imports Triton
import torch
from platforms.cuda.tests.software_plugin import MEMORY, SPEC
from triton.runtime import interpreter

from mvllm.plugin_api import Capabilities, DeviceRuntime, PlatformSpec, WorkerContext
from mvllm_cuda.platform import CUDAPlatform
from mvllm_example_device.runtime import _load_library
from mvllm_example_device.settings import Settings
from mvllm_torch_gpu.device_module import DeviceModule
from mvllm_torch_gpu.runtime import TorchGpuRuntime
from mvllm_torch_gpu.step_graphs import StepGraphBackend
from tests.helpers.host_sync import ForbidHostReads

MOST_TOKENS = 1 << 8
"""Maximum tokens of a sequence in a captured step: kernels are launched for as many."""

HostGraphs = importlib.import_module("platforms.torch-gpu.tests.host_graphs").HostGraphs


class ForbidDeviceReads(ForbidHostReads):
    """Raises on calls that read values of the device's tensors; their addresses are no values."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.device.type != "example")

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") == "data_ptr":
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class SoftwareGraphs(HostGraphs):
    """HostGraphs that tell tensors of the host from those of the device."""

    def forbid_reads(self) -> ForbidDeviceReads:
        return ForbidDeviceReads()


class SoftwareModule(DeviceModule):
    """`torch.example` with the names of `torch.cuda`."""

    type = "example"

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def empty_host_cache(self) -> None:
        """There is none: torch's function accesses an allocator that this device has not registered."""


class UnknownDriverMemory:
    """DriverMemory of a device that the driver does not show."""

    def free(self) -> None:
        """Unknown."""

    def held_by_this_process(self) -> None:
        """Unknown."""


class SoftwareRuntime(TorchGpuRuntime):
    """The shared runtime on the software device."""

    library = "the example device"
    after_failure = "Restart the engine."
    module = SoftwareModule()

    def __init__(self, ctx: WorkerContext) -> None:
        open_device()
        super().__init__(ctx, unified=False)

    def check_build(self) -> None:
        """Any torch will do."""

    def visibility_variables(self) -> str:
        return ""

    def driver_memory(self, index: int) -> UnknownDriverMemory:
        return UnknownDriverMemory()

    def refusal(self, properties: Any) -> None:
        return None


class SoftwarePlatform(CUDAPlatform):
    """See the module.

    Attributes:
        graphs_made: Graphs of all engines so far.
    """

    module = SoftwareModule()
    graphs_made: ClassVar[list[Any]] = []

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, pinned_memory=False)

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        return SoftwareRuntime(ctx)

    def compiler(self) -> StepGraphBackend:
        graphs = SoftwareGraphs()
        self.graphs_made.append(graphs)
        return StepGraphBackend(lambda: graphs, "software", table_tokens=MOST_TOKENS)

    def doctor(self) -> tuple[()]:
        return ()


def open_device() -> None:
    """Registers the device with torch, gives its module the names of `torch.cuda`, and prepares the interpreter."""
    _load_library(Settings(devices=1, memory=MEMORY))
    statistics = torch.ops.mvllm_example_device.memory
    vars(torch.example).update(
        set_device=lambda device: None,
        get_device_properties=lambda device: types.SimpleNamespace(
            name="software device", multi_processor_count=4, shared_memory_per_block_optin=64 << 10, major=8, minor=0
        ),
        mem_get_info=lambda device: (lambda limit, used, peak: (limit - used, limit))(*statistics(0)),
        memory_reserved=lambda device: statistics(0)[1],
        memory_allocated=lambda device: statistics(0)[1],
        max_memory_allocated=lambda device: statistics(0)[2],
        reset_peak_memory_stats=lambda device: torch.ops.mvllm_example_device.reset_peak(0),
        empty_cache=lambda: None,
        synchronize=lambda device=None: None,
        manual_seed=lambda seed: None,
        Stream=lambda device=None: _Stream(),
        Event=lambda **options: _Event(),
        current_stream=lambda device=None: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
    )
    ignore_pinning()
    check_launches()


class _Stream:
    """Work is done when a call returns."""

    def wait_stream(self, other: _Stream) -> None:
        """Nothing is left to do."""

    def query(self) -> bool:
        """Nothing is left to do."""
        return True


class _Event:
    """A point in the order of work, which is always reached."""

    def record(self, stream: object = None) -> None:
        """Nothing is left to do."""

    wait = record

    def synchronize(self) -> None:
        """Nothing is left to do."""


def ignore_pinning() -> None:
    """Makes page-locked memory plain memory in this process."""
    if getattr(torch.empty, "pins_nothing", False):
        return
    empty = torch.empty

    def without_pinning(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    without_pinning.pins_nothing = True  # type: ignore[attr-defined]
    torch.empty = without_pinning  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor.clone()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A launch within a captured step."""

    run: Callable[[], None]
    results: tuple[()] = ()
    works_in_place = computes = True

    def run_again(self) -> None:
        """Launches the kernel with the arguments of the capture."""
        self.run()


def check_launches() -> None:
    """Makes launches with tensors of the host fail, and records launches of captured steps.

    The interpreter copies arguments to the host and back. The device's memory is the host's, so a kernel computes in
    place.
    """
    executor = interpreter.GridExecutor
    if getattr(executor, "checks_devices", False):
        return
    call = executor.__call__

    def checked(self: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = {**dict(zip(self.arg_names, args, strict=False)), **options}
        found = [f"{name} ({tensor.device})" for name, tensor in _tensors(named) if tensor.device.type != "example"]
        if found:
            raise ValueError(f"The kernel {self.fn.__name__} was launched with tensors of the host: {', '.join(found)}")
        return args, options

    def launch(self: Any, *args: Any, **options: Any) -> None:
        HostGraphs.record(_Launch(lambda: call(self, *args, **options)))
        call(self, *args, **options)

    executor.checks_devices = True
    executor._init_args_hst = checked
    executor._restore_args_dev = lambda self, *unused: None
    executor.__call__ = launch


def _tensors(named: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, argument in named.items():
        for part in argument if isinstance(argument, tuple) else (argument,):
            tensor = getattr(part, "base", part)  # of a descriptor
            if isinstance(tensor, torch.Tensor):
                found.append((name, tensor))
    return found
