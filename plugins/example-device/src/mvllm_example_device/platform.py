"""The platform: every method in its phase, each answer from the contract."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Check,
    CheckStatus,
    Communicator,
    ConfigChange,
    DeviceRuntime,
    EngineConfig,
    GroupSpec,
    LaunchTopology,
    OpProvider,
    ParallelConfig,
    Phase,
    Plan,
    Platform,
    PlatformError,
    PlatformSpec,
    Refusal,
    Refusals,
    ShapePolicy,
    WorkerContext,
    require_phase,
)
from mvllm_example_device.faults import FaultPlan
from mvllm_example_device.plugin import LIBRARY, SPEC
from mvllm_example_device.settings import Settings
from mvllm_example_device.strict import Strict, in_worker

if TYPE_CHECKING:
    import torch

    from mvllm_example_device.runtime import ExampleRuntime

DTYPES = ("float32", "bfloat16")
BUCKETS = ShapePolicy(tokens=(8, 32, 128, 512, 2048, 8192), requests=(4, 16, 64, 256), pages=(4, 16, 64, 256, 1024))


def make_platform() -> Platform:
    """The factory that the plugin names."""
    return ExamplePlatform()


class ExamplePlatform(Strict, Platform):
    """See the package. One object per process; it remembers the device that this process has opened."""

    def __init__(self) -> None:
        self._settings = Settings.from_environment()
        self._faults = FaultPlan.from_environment()
        self._runtime: ExampleRuntime | None = None

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            max_head_size=256,
            lazy=self._settings.mode == "lazy",
            static_shapes=self._settings.mode == "static",
            async_copies=True,
            collectives=frozenset(
                ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
                + ("send_recv", "gather", "all_to_all", "barrier")
            ),
            fork_safe=True,
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
        )

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        require_phase(Phase.FRONTEND)
        refusals = [
            Refusal(field, f"{name} is not supported on this platform", f"Use one of: auto, {', '.join(DTYPES)}.")
            for field, name in (("model.dtype", config.model.dtype), ("cache.dtype", config.cache.dtype))
            if name not in ("auto", *DTYPES)
        ]
        if refusals:
            return Refusals(tuple(refusals))
        if config.cache.memory_utilization is not None:
            return Plan()
        return Plan((ConfigChange("cache.memory_utilization", 0.9, "the device's memory serves nothing else"),))

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        require_phase(Phase.FRONTEND, Phase.ENGINE)
        return LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("uni", "mp", "external_launcher", "ray"),
            env_per_worker=(self._settings.as_environment(),) * parallel.world_size,
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        in_worker()
        from mvllm_example_device.runtime import ExampleRuntime

        self._faults.rank = ctx.rank
        self._faults.reach("init_device")
        self._runtime = ExampleRuntime(ctx, self._settings, self._faults)
        return self._runtime

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        self._opened().check()
        from mvllm_example_device.communicator import ExampleCommunicator

        return ExampleCommunicator(group, device)

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        runtime = self._opened()
        from mvllm_example_device.attention import ExampleAttention

        self._faults.reach("load")
        if problems := ExampleAttention.validate(spec):
            raise PlatformError(f"The example device has no attention for this model: {'; '.join(problems)}.")
        return ExampleAttention(spec, runtime, self._faults)

    def ops(self) -> Sequence[OpProvider]:
        in_worker()
        from mvllm_example_device.attention import providers

        return providers(self._compiled)

    def worker_class(self) -> str | None:
        require_phase(Phase.ENGINE, Phase.WORKER)
        return None

    def shapes(self) -> ShapePolicy:
        in_worker()
        return BUCKETS if self._settings.mode == "static" else ShapePolicy()

    def doctor(self) -> Sequence[Check]:
        require_phase(Phase.FRONTEND)
        built = LIBRARY.exists() and importlib.util.find_spec("torch") is not None
        status = CheckStatus.OK if built else CheckStatus.BROKEN
        found = f"{LIBRARY.name} is {'there' if built else 'not there, or torch is not'}"
        remedy = None if built else "Reinstall mvllm-example-device where there are torch and a C++ compiler."
        return (Check("platform.example.library", status, found, remedy),)

    def _opened(self) -> ExampleRuntime:
        in_worker()
        if self._runtime is None:
            raise PlatformError("The device was not opened: init_device comes first.")
        return self._runtime

    def _compiled(self, *shape: Hashable) -> None:
        self._opened().compile(*shape)
