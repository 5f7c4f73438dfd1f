"""The Platform interface: what a hardware plugin implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.contract import ANY, Phase, phase
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
    @phase(ANY)
    def spec(self) -> PlatformSpec:
        """The plugin's PlatformSpec."""

    @property
    @abstractmethod
    @phase(ANY)
    def capabilities(self) -> Capabilities:
        """The capability flags."""

    @abstractmethod
    @phase(Phase.FRONTEND)
    def plan(self, config: EngineConfig) -> Plan | Refusals:
        """Accepts a configuration, with changes and their reasons, or refuses it with reasons and remedies.

        Pure: it neither changes `config` nor opens a device. `model.dtype` may be `auto`. If the plan
        leaves it, core selects the checkpoint's dtype if it is among `capabilities.dtypes`, else the first of these.
        """

    @abstractmethod
    @phase(Phase.FRONTEND, Phase.ENGINE)
    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        """Number of workers, devices per worker, executors and environment. Pure.

        It returns a topology for every world size. Core checks whether the listed executors are available.
        """

    @abstractmethod
    @phase(Phase.WORKER)
    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        """Binds this process to its device and seeds it. Once per worker.

        Raises:
            PlatformError: The device does not exist or cannot be opened; the message says what was found.
        """

    @abstractmethod
    @phase(Phase.WORKER)
    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        """Joins a group of at least two ranks.

        Raises:
            PlatformError: The ranks cannot connect.
        """

    @abstractmethod
    @phase(Phase.WORKER)
    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        """A backend for `spec`.

        Raises:
            PlatformError: No backend supports the spec; the message lists the reasons.
        """

    @phase(Phase.WORKER)
    def state_backend(self, spec: StateSpec) -> StateBackend:
        """A backend for sequence states of `spec`. Since contract 1.1.

        Called only if `capabilities.state`. Default: torch tensors on the device.

        Raises:
            PlatformError: No backend supports the spec; the message lists the reasons.
        """
        return StateBackend(spec)

    @phase(Phase.WORKER)
    def ops(self) -> Sequence[OpProvider]:
        """Operations that the platform replaces. Default: none; the references run."""
        return ()

    @phase(Phase.ENGINE, Phase.WORKER)
    def worker_class(self) -> str | None:
        """`package.module:Class` of the platform's WorkerProtocol, or None for core's."""
        return None

    @phase(Phase.WORKER)
    def graphs(self, device: torch.device) -> GraphBackend | None:
        """Deprecated until contract 2.0: nothing calls it; `compiler` captures graphs. Default: None."""
        return None

    @phase(Phase.WORKER)
    def compiler(self) -> CompileBackend | None:
        """A compiler, if `capabilities.compile`. Default: None."""
        return None

    @phase(Phase.WORKER)
    def graph_compiler(self) -> GraphCompiler | None:
        """Translates models to the device's own runtime, if `capabilities.graph_compiler`.

        Since contract 1.1. Models then run as StepGraphs, by the worker of the package mvllm-graph, which asks for no
        op providers, attention backends or state backends, except in the conformance suite. Default: None.
        """
        return None

    @phase(Phase.WORKER)
    def shapes(self) -> ShapePolicy:
        """Sizes to which steps are padded. Default: no padding."""
        return ShapePolicy()

    @phase(Phase.FRONTEND)
    def doctor(self) -> Sequence[Check]:
        """The platform's diagnostics, with ids `platform.<name>.<subject>`. Opens no device."""
        return ()
