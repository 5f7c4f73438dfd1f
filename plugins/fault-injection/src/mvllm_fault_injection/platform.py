"""FaultyPlatform: the host through plain torch, with injected faults."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BatchLayout,
    Capabilities,
    Communicator,
    DeviceRuntime,
    EngineConfig,
    FinishedHostCopy,
    GroupSpec,
    HostCopy,
    KVCache,
    LaunchTopology,
    MemoryInfo,
    ParallelConfig,
    Plan,
    Platform,
    PlatformSpec,
    ReferenceAttention,
    Refusals,
    TorchCommunicator,
    WorkerContext,
)
from mvllm_example_device.faults import FaultPlan
from mvllm_fault_injection.plugin import SPEC

MEMORY_BYTES = 4 << 30


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return FaultyPlatform()


def peak_resident_bytes() -> int:
    """Peak resident memory of this program. getrusage, the fallback, includes the memory of the parent at the fork."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class FaultyRuntime(DeviceRuntime):
    """DeviceRuntime over host tensors; work is done when a call returns.

    Args:
        plan: The faults of this process.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryInfo:
        used = peak_resident_bytes()
        free = self._plan.free_memory(max(0, MEMORY_BYTES - used))
        return MemoryInfo(total=MEMORY_BYTES, free=free, used_by_me=used, peak_by_me=used)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return FinishedHostCopy(tensor)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class FaultyAttention(ReferenceAttention):
    """Reference attention with the faults of the phase `execute`. A step starts when its metadata is built.

    Args:
        spec: See AttentionBackend.
        plan: The faults of this process.
    """

    def __init__(self, spec: AttentionSpec, plan: FaultPlan) -> None:
        super().__init__(spec)
        self._plan = plan

    def build_metadata(self, batch: BatchLayout) -> AttentionMetadata:
        self._plan.begin_step()
        if self._plan.starved:
            raise MemoryError("injected: a step found no memory")
        return super().build_metadata(batch)

    def forward(
        self,
        query: torch.Tensor,
        kv: KVCache,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = super().forward(query, kv, metadata, sinks)
        return output * torch.nan if self._plan.poisoned else output


class FaultyPlatform(Platform):
    """The platform. One object per process, so it holds the faults of the process."""

    def __init__(self) -> None:
        self._plan = FaultPlan.from_environment()

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=("float32", "bfloat16"),
            kv_dtypes=("float32", "bfloat16"),
            unified_memory=True,
            scaled_memory_profile=True,
            collectives=frozenset({"all_reduce", "all_gather", "broadcast", "send_recv", "barrier"}),
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
        )

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        return Plan()

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        # Workers need not be children of this process, so each gets the variable.
        faults = {name: os.environ[name] for name in ("FAULT_INJECTION",) if name in os.environ}
        return LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("uni", "mp", "external_launcher", "ray"),
            env_per_worker=tuple({"FAULT_INJECTION_RANK": str(rank), **faults} for rank in range(parallel.world_size)),
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        self._plan.rank = ctx.rank
        self._plan.reach("init_device")
        runtime = FaultyRuntime(self._plan)
        runtime.seed(ctx.seed)
        return runtime

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        return TorchCommunicator(group, device=device, backend="gloo")

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        self._plan.reach("load")
        return FaultyAttention(spec, self._plan)
