"""The TPU platform: TPUs, and XLA's CPU device, through torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Check,
    Communicator,
    CompileBackend,
    ConfigChange,
    DeviceRuntime,
    EngineConfig,
    GroupSpec,
    LaunchTopology,
    OpProvider,
    ParallelConfig,
    Plan,
    Platform,
    PlatformError,
    PlatformSpec,
    Refusals,
    ShapePolicy,
    StateBackend,
    StateSpec,
    WorkerContext,
)
from mvllm_tpu import compile_mode, runtimes, shapes, xla_devices
from mvllm_tpu.plugin import SPEC
from mvllm_tpu.probe import INSTALL
from mvllm_tpu.runtimes.interface import Runtime

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float32")
KV_DTYPES = DTYPES
HOST_MEMORY_SHARE = 0.5
"""Default share of memory on XLA's CPU device, which uses the host's memory."""

DEVICES_VARIABLE = "MVLLM_TPU_DEVICES_PER_WORKER"
"""With 1, every device has its own worker. Unset: one worker drives tensor_parallel_size devices."""

COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "gather", "all_to_all", "barrier"}
)


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return TPUPlatform()


class TPUPlatform(Platform):
    """Platform whose workers drive one or several XLA devices."""

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        runtime = runtimes.choose()
        return Capabilities(
            dtypes=DTYPES,
            kv_dtypes=KV_DTYPES,
            lazy=runtime is not None and runtime.lazy,
            compile=runtime is not None and runtime.compiles,
            static_shapes=True,
            unified_memory=xla_devices.find().on_host,
            fork_safe=runtime is None or runtime.fork_safe,
            devices_per_process=None if runtime is not None and runtime.supports_spmd else 1,
            collectives=COLLECTIVES,
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            mla=True,
            state=True,
        )

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        compile_mode.mode()  # an invalid value raises here, not in a worker
        changes = []
        if config.cache.memory_utilization is None and xla_devices.find().on_host:
            reason = "the memory of XLA's CPU device is the host's; set it yourself to take more"
            changes.append(ConfigChange("cache.memory_utilization", HOST_MEMORY_SHARE, reason))
        return Plan(tuple(changes))

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        across = ("mp", "external_launcher")
        runtime, found = runtimes.choose(), xla_devices.find()
        num_devices = parallel.tensor_parallel_size if runtime is not None and runtime.supports_spmd else 1
        if os.environ.get(DEVICES_VARIABLE) == "1":
            num_devices = 1
        num_workers = parallel.world_size // num_devices
        variables = {} if runtime is None else dict(runtime.variables(found))
        in_process = num_workers == 1 and (runtime is None or runtime.runs_in_engine_process(num_devices))
        if num_devices > 1 and found.on_host:
            variables[xla_devices.NUM_CPUS_VARIABLE] = str(num_devices)
            in_process = in_process and len(found.names) == num_devices  # a process cannot change its visible devices
        return LaunchTopology(
            num_workers=num_workers,
            devices_per_worker=num_devices,
            executors=("uni", *across) if in_process else across,
            env_per_worker=(variables,) * num_workers,
            device_variable=xla_devices.VISIBLE_VARIABLE,
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        return _runtime().bind(ctx)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        return _runtime().communicator(group, device)

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        from mvllm_tpu.attention import XlaAttention

        problems = XlaAttention.validate(spec)
        if problems:
            raise PlatformError(f"The TPU platform has no attention for this model: {'; '.join(problems)}.")
        return _runtime().attention(spec)

    def state_backend(self, spec: StateSpec) -> StateBackend:
        return _runtime().states(spec)

    def ops(self) -> Sequence[OpProvider]:
        found = runtimes.choose()
        return () if found is None else found.ops()

    def compiler(self) -> CompileBackend | None:
        return _runtime().compiler()

    def shapes(self) -> ShapePolicy:
        return shapes.policy()

    def doctor(self) -> Sequence[Check]:
        from mvllm_tpu import doctor

        return doctor.checks()


def _runtime() -> Runtime:
    """The runtime of this process.

    Raises:
        PlatformError: No runtime is installed.
    """
    found = runtimes.choose()
    if found is None:
        raise PlatformError(f"Nothing here leads from torch to XLA: torch_xla is not installed. {INSTALL}")
    return found
