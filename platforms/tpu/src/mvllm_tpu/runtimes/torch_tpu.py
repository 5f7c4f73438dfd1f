"""torch_tpu, the successor of torch_xla: tensors of torch's foreign device, eager operations, torch.compile to XLA.

Each operation is a program of its own, compiled when it is first met; torch.compile makes one of a whole model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
        WorkerContext,
    )
    from mvllm_tpu.xla_devices import Devices

LIBRARY_VARIABLE = "TPU_LIBRARY_PATH"
"""The library behind which its devices are; unset, that of the package libtpu."""


class TorchTpu(Runtime):
    """See Runtime."""

    name: ClassVar[str] = "torch_tpu"
    lazy: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    fork_safe: ClassVar[bool] = False  # the child of a process that had torch has been seen to hang

    def problem(self, devices: Devices) -> str | None:
        if devices.on_host and not os.environ.get(LIBRARY_VARIABLE):
            return (
                f"torch_tpu brings no CPU device of XLA's, and {LIBRARY_VARIABLE} names no library that does; "
                "torch_xla brings one"
            )
        return None

    def variables(self, devices: Devices) -> Mapping[str, str]:
        """None: it finds the chips that a process may see by itself."""
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

    def compiler(self) -> CompileBackend:
        from mvllm_tpu.step_compiler import StepCompiler

        return StepCompiler()
