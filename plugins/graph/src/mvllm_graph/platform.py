"""GraphPlatform: the base class of platforms whose device has a compiler or runtime of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from mvllm.extension_api.contract import ANY, Phase, phase
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Communicator,
    ConfigChange,
    DeviceRuntime,
    EngineConfig,
    GraphCompiler,
    GroupSpec,
    LaunchTopology,
    OpProvider,
    ParallelConfig,
    Plan,
    Platform,
    PlatformError,
    Refusals,
    StateBackend,
    StateSpec,
    WorkerContext,
)

if TYPE_CHECKING:
    import torch

HOST_MEMORY_SHARE = 0.5
"""Default `memory_utilization` on the host: other programs use its memory as well."""


class GraphPlatform(Platform):
    """A platform that implements a GraphCompiler; core's own tensors are torch tensors in host memory.

    A subclass implements `spec`, `dtypes` and `graph_compiler`. It overrides `init_device` with a runtime whose
    `memory` is that of the device, if that is not the host's, and `capabilities` for features that its compiler lacks.
    Operations, attention and states of a single layer, which the conformance suite tests, are programs of one node.

    Unless `capabilities` is overridden, the platform claims `graph_compiler`, `prefix_caching`, `chunked_prefill`,
    `sliding_window`, `soft_cap`, `sinks`, `mla`, `state`, `unified_memory`, `scaled_memory_profile` and the collectives
    `all_reduce`, `all_gather`, `broadcast`, `send_recv`, `gather` and `barrier`, for the dtypes of its attributes, and
    nothing else.

    Attributes:
        dtypes: Compute dtypes, the preferred one first.
        kv_dtypes: Storage dtypes of the KV cache; empty means `dtypes`.
    """

    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...] = ()

    @abstractmethod
    @phase(Phase.WORKER)
    def graph_compiler(self) -> GraphCompiler:
        """The compiler."""

    @property
    @phase(ANY)
    def capabilities(self) -> Capabilities:
        """What every platform of this class claims. Override it with `dataclasses.replace`."""
        return Capabilities(
            dtypes=self.dtypes,
            kv_dtypes=self.kv_dtypes or self.dtypes,
            unified_memory=True,
            scaled_memory_profile=True,
            collectives=frozenset({"all_reduce", "all_gather", "broadcast", "send_recv", "gather", "barrier"}),
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            mla=True,
            state=True,
            graph_compiler=True,
        )

    @phase(Phase.FRONTEND)
    def plan(self, config: EngineConfig) -> Plan | Refusals:
        changes = []
        if config.cache.memory_utilization is None and self.capabilities.unified_memory:
            reason = "the host's memory also serves everything else on this machine; set it yourself to take more"
            changes.append(ConfigChange("cache.memory_utilization", HOST_MEMORY_SHARE, reason))
        return Plan(tuple(changes))

    @phase(Phase.FRONTEND, Phase.ENGINE)
    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        across = ("mp", "ray", "external_launcher")
        executors = ("uni", *across) if parallel.world_size == 1 else across
        return LaunchTopology(num_workers=parallel.world_size, devices_per_worker=1, executors=executors)

    @phase(Phase.WORKER)
    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_graph.host_runtime import HostRuntime

        return HostRuntime(ctx)

    @phase(Phase.WORKER)
    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm.plugin_api import TorchCommunicator

        return TorchCommunicator(group, backend="gloo")

    @phase(Phase.WORKER)
    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        from mvllm_graph.one_node import OneNodeAttention

        backend = OneNodeAttention.of(self._compiler, self.capabilities.kv_dtypes)
        if problems := backend.validate(spec):
            raise PlatformError(f"The platform {self.spec.name!r} has no attention for this: {'; '.join(problems)}")
        return backend(spec)

    @phase(Phase.WORKER)
    def state_backend(self, spec: StateSpec) -> StateBackend:
        return StateBackend(spec)

    @phase(Phase.WORKER)
    def ops(self) -> Sequence[OpProvider]:
        from mvllm_graph.one_node import one_node_providers

        return one_node_providers(self._compiler, self.spec.name)

    @cached_property
    def _compiler(self) -> GraphCompiler:
        return self.graph_compiler()
