"""torch_xla: tensors are lazy. Operations are recorded, and compiled and run as one program at `torch_xla.sync`.

torch.compile records a model once for each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mvllm_tpu.compile_cache import UNKNOWN_VERSION, version
from mvllm_tpu.runtimes.interface import Runtime

if TYPE_CHECKING:
    import torch

    from mvllm.plugin_api import (
        AttentionBackend,
        AttentionSpec,
        Communicator,
        CompileBackend,
        DeviceRuntime,
        GroupSpec,
        OpProvider,
        StateBackend,
        StateSpec,
        WorkerContext,
    )
    from mvllm_tpu.xla_devices import Devices


class TorchXla(Runtime):
    """Runtime of torch_xla."""

    name: ClassVar[str] = "torch_xla"
    lazy: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    supports_spmd: ClassVar[bool] = True
    _num_devices: ClassVar[int] = 0
    """Number of devices of this process's worker; 0 before it has bound them."""

    def problem(self, devices: Devices) -> str | None:
        """torch_xla's libraries are linked against one minor version of torch, which its metadata does not require."""
        found = {name: version(name) for name in ("torch_xla", "torch")}
        needed, installed = (".".join(each.split(".")[:2]) for each in found.values())
        if UNKNOWN_VERSION in found.values() or needed == installed:
            return None
        return f"torch_xla {found['torch_xla']} needs torch {needed}, and torch {found['torch']} is installed"

    def runs_in_engine_process(self, num_devices: int) -> bool:
        """False if the process has bound another number of devices: XLA cannot enter or leave SPMD mode afterwards."""
        return self._num_devices in (0, num_devices)

    def variables(self, devices: Devices) -> Mapping[str, str]:
        """PJRT_DEVICE, so that XLA does not choose the device type itself."""
        return {"PJRT_DEVICE": devices.kind}

    def bind(self, ctx: WorkerContext) -> DeviceRuntime:
        TorchXla._num_devices = ctx.num_devices
        if ctx.num_devices > 1:
            from mvllm_tpu.spmd import SpmdRuntime

            return SpmdRuntime(ctx)
        from mvllm_tpu.lazy_runtime import LazyRuntime

        return LazyRuntime(ctx)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm_tpu.communicator import make_communicator

        return make_communicator(group, device)

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        from mvllm_tpu.pallas_attention import kernel_chosen

        if self._num_devices > 1:
            from mvllm_tpu.spmd import SpmdAttention

            kernel_chosen(spec, ["one worker drives several devices, among which XLA cannot cut it"])
            return SpmdAttention(spec, self._num_devices)
        from mvllm_tpu.runtimes.lazy_attention import LazyAttention, LazyPallasAttention

        return LazyPallasAttention(spec) if kernel_chosen(spec) else LazyAttention(spec)

    def states(self, spec: StateSpec) -> StateBackend:
        from mvllm_tpu.lazy_runtime import require_room
        from mvllm_tpu.runtimes.lazy_attention import materialize
        from mvllm_tpu.state import XlaStateBackend

        return XlaStateBackend(spec, require_room, materialize)

    def ops(self) -> Sequence[OpProvider]:
        from mvllm.plugin_api import static_state_ops
        from mvllm_tpu.runtimes.lazy_attention import reuse_buffer

        return static_state_ops(reuse_buffer)

    def compiler(self) -> CompileBackend:
        """torch.compile, if the worker has one device; in SPMD mode and on request, steps are recorded."""
        from mvllm_tpu.compile_mode import mode
        from mvllm_tpu.step_compiler import LazyStepCompiler, NoStepCompiler

        return LazyStepCompiler() if mode() == "openxla" and self._num_devices == 1 else NoStepCompiler()
