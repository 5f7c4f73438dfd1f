"""The contract's centre: one object per kind of hardware."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.communicator import Communicator
from mvllm.platform.graphs import CompileBackend, GraphBackend
from mvllm.platform.op_provider import OpProvider
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.spec import Check, Plan, PlatformSpec, Refusals
from mvllm.platform.topology import GroupSpec, LaunchTopology, WorkerContext

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of hardware. Made by the plugin's factory; stateless, so that processes pass its name, never the object.

    The factory may import torch; it must not open a device. Each method names the phase in which core calls it.
    """

    @property
    @abstractmethod
    def spec(self) -> PlatformSpec:
        """The identity card. Phase: any."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do. Phase: any."""

    @abstractmethod
    def plan(self, config: EngineConfig) -> Plan | Refusals:
        """Accepts a configuration, with changes and their reasons, or declines it with reasons and remedies.

        Phase: frontend. Pure: it neither changes `config` nor opens a device. `model.dtype` may be `auto`, and the plan
        need not settle it: core then takes the checkpoint's dtype if it is among `capabilities.dtypes`, else the first.
        """

    @abstractmethod
    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        """Where workers run. Phase: frontend or engine. Pure.

        It answers for every world size; that the executors it allows cannot be had here is for core to say.
        """

    @abstractmethod
    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        """Binds this process to its device and seeds it. Phase: worker; once per worker.

        Raises:
            PlatformError: There is no such device, or it cannot be opened; the message says what was found.
        """

    @abstractmethod
    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Joins a group of at least two ranks. Phase: worker.

        Raises:
            PlatformError: The ranks do not find each other.
        """

    @abstractmethod
    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        """A backend for `spec`. Phase: worker.

        Raises:
            PlatformError: No backend takes the spec; the message lists the reasons.
        """

    def ops(self) -> Sequence[OpProvider]:
        """Operations that it replaces. Phase: worker. Default: none, the references run."""
        return ()

    def worker_class(self) -> str | None:
        """`package.module:Class` of its own WorkerProtocol, or None for core's. Phase: engine or worker."""
        return None

    def graphs(self, device: torch.device) -> GraphBackend | None:
        """Graph capture, where `capabilities.graphs`. Phase: worker."""
        return None

    def compiler(self) -> CompileBackend | None:
        """A compiler, where `capabilities.compile`. Phase: worker."""
        return None

    def shapes(self) -> ShapePolicy:
        """Step sizes. Phase: worker. Default: free."""
        return ShapePolicy()

    def doctor(self) -> Sequence[Check]:
        """Diagnostics of its own, with ids `platform.<name>.<subject>`. Phase: frontend; opens no device."""
        return ()
