"""torch_tpu, the successor of torch_xla: a torch device (PrivateUse1), eager operations, and torch.compile to XLA.

Each eager operation is a separate program, compiled at its first use; torch.compile makes one program of a whole model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

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

LIBRARY_VARIABLE = "TPU_LIBRARY_PATH"
"""Path of the library that provides the devices; by default, the library of the package libtpu."""


class TorchTpu(Runtime):
    """Runtime of torch_tpu."""

    name: ClassVar[str] = "torch_tpu"
    lazy: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    fork_safe: ClassVar[bool] = False  # a fork of a process that had loaded torch was observed to hang

    def problem(self, devices: Devices) -> str | None:
        if devices.on_host and not os.environ.get(LIBRARY_VARIABLE):
            return (
                f"torch_tpu brings no CPU device of XLA's, and {LIBRARY_VARIABLE} names no library that does; "
                "torch_xla brings one"
            )
        return None

    def variables(self, devices: Devices) -> Mapping[str, str]:
        """No variables: torch_tpu finds the visible chips itself."""
        return {}

    def bind(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_tpu.eager_runtime import EagerRuntime

        return EagerRuntime(ctx)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm_tpu.communicator import HostCommunicator

        return HostCommunicator(group, device)

    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        from mvllm_tpu.pallas_attention import kernel_chosen
        from mvllm_tpu.runtimes.eager_attention import EagerAttention

        kernel_chosen(spec, ["it comes with torch_xla, and this is torch_tpu"])
        return EagerAttention(spec)

    def states(self, spec: StateSpec) -> StateBackend:
        from mvllm_tpu.eager_runtime import require_room
        from mvllm_tpu.state import XlaStateBackend

        return XlaStateBackend(spec, require_room)

    def ops(self) -> Sequence[OpProvider]:
        from mvllm.plugin_api import static_state_ops

        return static_state_ops()

    def compiler(self) -> CompileBackend:
        from mvllm_tpu.step_compiler import StepCompiler

        return StepCompiler()
