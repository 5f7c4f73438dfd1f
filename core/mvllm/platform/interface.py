"""The Platform interface: what a hardware plugin implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.communicator import Communicator
from mvllm.platform.graph_compiler import GraphCompiler
from mvllm.platform.graphs import CompileBackend, GraphBackend
from mvllm.platform.op_provider import OpProvider
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.platform.spec import Check, Plan, PlatformSpec, Refusals
from mvllm.platform.state import StateBackend, StateSpec
from mvllm.platform.topology import GroupSpec, LaunchTopology, WorkerContext

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of hardware. Created by the plugin's factory; stateless: processes exchange its name, not the object.

    The factory may import torch; it must not open a device. Each method states the phase in which core calls it.
    """

    @property
    @abstractmethod
    def spec(self) -> PlatformSpec:
        """The plugin's PlatformSpec. Phase: any."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The capability flags. Phase: any."""

    @abstractmethod
    def plan(self, config: EngineConfig) -> Plan | Refusals:
        """Accepts a configuration, with changes and their reasons, or refuses it with reasons and remedies.

        Phase: frontend. Pure: it neither changes `config` nor opens a device. `model.dtype` may be `auto`. If the plan
        leaves it, core selects the checkpoint's dtype if it is among `capabilities.dtypes`, else the first of these.
        """

    @abstractmethod
    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        """Number of workers, devices per worker, executors and environment. Phase: frontend or engine. Pure.

        It returns a topology for every world size. Core checks whether the listed executors are available.
        """

    @abstractmethod
    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        """Binds this process to its device and seeds it. Phase: worker; once per worker.

        Raises:
            PlatformError: The device does not exist or cannot be opened; the message says what was found.
        """

    @abstractmethod
    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Joins a group of at least two ranks. Phase: worker.

        Raises:
            PlatformError: The ranks cannot connect.
        """

    @abstractmethod
    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        """A backend for `spec`. Phase: worker.

        Raises:
            PlatformError: No backend supports the spec; the message lists the reasons.
        """

    def state_backend(self, spec: StateSpec) -> StateBackend:
        """A backend for sequence states of `spec`. Phase: worker. Since contract 1.1.

        Called only if `capabilities.state`. Default: torch tensors on the device.

        Raises:
            PlatformError: No backend supports the spec; the message lists the reasons.
        """
        return StateBackend(spec)

    def ops(self) -> Sequence[OpProvider]:
        """Operations that the platform replaces. Phase: worker. Default: none; the references run."""
        return ()

    def worker_class(self) -> str | None:
        """`package.module:Class` of the platform's WorkerProtocol, or None for core's. Phase: engine or worker."""
        return None

    def graphs(self, device: torch.device) -> GraphBackend | None:
        """Deprecated until contract 2.0: nothing calls it; `compiler` captures graphs. Phase: worker. Default: None."""
        return None

    def compiler(self) -> CompileBackend | None:
        """A compiler, if `capabilities.compile`. Phase: worker. Default: None."""
        return None

    def graph_compiler(self) -> GraphCompiler | None:
        """Translates models to the device's own runtime, if `capabilities.graph_compiler`. Phase: worker.

        Since contract 1.1. Core then runs models as StepGraphs: it asks for no op providers, attention backends or
        state backends, except in the conformance suite. Default: None.
        """
        return None

    def shapes(self) -> ShapePolicy:
        """Sizes to which steps are padded. Phase: worker. Default: no padding."""
        return ShapePolicy()

    def doctor(self) -> Sequence[Check]:
        """The platform's diagnostics, with ids `platform.<name>.<subject>`. Phase: frontend; opens no device."""
        return ()
