"""Interface of a package that connects torch and XLA.

Creating a Runtime and reading its attributes imports neither torch nor the library, because the front end does both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

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


class Runtime(ABC):
    """A package that connects torch and XLA.

    Attributes:
        name: The library's import name.
        lazy: Capabilities.lazy: operations are recorded, and run at `DeviceRuntime.step_mark`.
        compiles: Capabilities.compile: whether `compiler` returns a backend.
        supports_spmd: Whether one worker can drive several devices.
        fork_safe: Capabilities.fork_safe.
    """

    name: ClassVar[str]
    lazy: ClassVar[bool]
    compiles: ClassVar[bool] = False
    supports_spmd: ClassVar[bool] = False
    fork_safe: ClassVar[bool] = True

    def problem(self, devices: Devices) -> str | None:
        """Why the package cannot open these devices, from files and variables; None if it can. Phase: any."""
        return None

    @abstractmethod
    def variables(self, devices: Devices) -> Mapping[str, str]:
        """Environment variables of every worker. Phase: engine."""

    def runs_in_engine_process(self, num_devices: int) -> bool:
        """Whether a worker with this number of devices can run in this process now. Phase: engine."""
        return True

    @abstractmethod
    def bind(self, ctx: WorkerContext) -> DeviceRuntime:
        """Binds this process to its device. Phase: worker.

        Raises:
            PlatformError: There is no such device, or it cannot be opened.
        """

    @abstractmethod
    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Joins a group of at least two ranks. Phase: worker."""

    @abstractmethod
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """Attention for a spec that `XlaAttention.validate` has accepted. Phase: worker."""

    @abstractmethod
    def states(self, spec: StateSpec) -> StateBackend:
        """Memory for sequence states. Phase: worker."""

    @abstractmethod
    def ops(self) -> Sequence[OpProvider]:
        """Operations in place of core's references. Phase: worker."""

    def compiler(self) -> CompileBackend | None:
        """The compiler if `compiles`, else None. Phase: worker."""
        return None
