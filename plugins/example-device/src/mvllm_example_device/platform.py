"""ExamplePlatform: the platform's methods, each restricted to the phase that the contract states."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import mvllm.plugin_api as api
from mvllm_example_device.faults import FaultPlan
from mvllm_example_device.plugin import DTYPES, LIBRARY, SPEC
from mvllm_example_device.settings import Settings
from mvllm_example_device.strict import Strict, in_worker

if TYPE_CHECKING:
    import torch

    from mvllm_example_device.runtime import ExampleRuntime

COLLECTIVES = "all_reduce all_gather reduce_scatter broadcast send_recv gather all_to_all barrier"
BUCKETS = api.ShapePolicy(tokens=(8, 32, 128, 512, 2048, 8192), requests=(4, 16, 64, 256), pages=(4, 16, 64, 256, 1024))


def make_platform() -> api.Platform:
    """The factory that the plugin's PlatformSpec names."""
    if Settings.from_environment().mode == "replay":
        from mvllm_example_device.replay_platform import ReplayPlatform

        return ReplayPlatform()
    return ExamplePlatform()


class ExamplePlatform(Strict, api.Platform):
    """The platform. One object per process; it holds the device that this process has opened."""

    def __init__(self) -> None:
        self._settings = Settings.from_environment()
        self._faults = FaultPlan.from_environment()
        self._runtime: ExampleRuntime | None = None

    @property
    def spec(self) -> api.PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            max_head_size=576,
            lazy=self._settings.mode == "lazy",
            static_shapes=self._settings.mode == "static",
            async_copies=True,
            collectives=frozenset(COLLECTIVES.split()),
            fork_safe=True,
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            mla=True,
            state=True,
            sparse_attention=True,
            kv_transfer=True,
            non_causal_spans=True,
            weight_offloading=True,
        )

    def plan(self, config: api.EngineConfig) -> api.Plan | api.Refusals:
        api.require_phase(api.Phase.FRONTEND)
        if config.cache.memory_utilization is not None:
            return api.Plan()
        return api.Plan((api.ConfigChange("cache.memory_utilization", 0.9, "the device's memory serves nothing else"),))

    def topology(self, parallel: api.ParallelConfig) -> api.LaunchTopology:
        api.require_phase(api.Phase.FRONTEND, api.Phase.ENGINE)
        return api.LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("uni", "mp", "external_launcher", "ray"),
            env_per_worker=(self._settings.as_environment(),) * parallel.world_size,
        )

    def init_device(self, ctx: api.WorkerContext) -> api.DeviceRuntime:
        in_worker()
        from mvllm_example_device.runtime import ExampleRuntime

        self._faults.rank = ctx.rank
        self._faults.reach("init_device")
        self._runtime = ExampleRuntime(ctx, self._settings, self._faults)
        return self._runtime

    def communicator(self, group: api.GroupSpec, device: torch.device) -> api.Communicator:
        self._opened().check()
        from mvllm_example_device.communicator import ExampleCommunicator

        return ExampleCommunicator(group, device)

    def attention_backend(self, spec: api.AttentionSpec) -> api.AttentionBackend:
        runtime = self._opened()
        from mvllm_example_device.attention import ExampleAttention

        self._faults.reach("load")
        if problems := ExampleAttention.validate(spec):
            raise api.PlatformError(f"The example device has no attention for this model: {'; '.join(problems)}.")
        return ExampleAttention(spec, runtime, self._faults)

    def state_backend(self, spec: api.StateSpec) -> api.StateBackend:
        in_worker()
        from mvllm_example_device.block_copies import LateStates

        return LateStates(spec)

    def ops(self) -> Sequence[api.OpProvider]:
        in_worker()
        from mvllm_example_device.attention import providers

        return providers(self._compiled)

    def worker_class(self) -> str | None:
        api.require_phase(api.Phase.ENGINE, api.Phase.WORKER)
        return None

    def shapes(self) -> api.ShapePolicy:
        in_worker()
        return BUCKETS if self._settings.mode == "static" else api.ShapePolicy()

    def doctor(self) -> Sequence[api.Check]:
        api.require_phase(api.Phase.FRONTEND)
        built = LIBRARY.exists() and importlib.util.find_spec("torch") is not None
        found = f"{LIBRARY.name} {'is there' if built else 'or torch is missing'}"
        if built:
            return (api.Check("platform.example.library", api.CheckStatus.OK, found),)
        remedy = "Reinstall mvllm-example-device in an environment with torch and a C++ compiler."
        return (api.Check("platform.example.library", api.CheckStatus.BROKEN, found, remedy),)

    def _opened(self) -> ExampleRuntime:
        in_worker()
        if self._runtime is None:
            raise api.PlatformError("The device is not open: call init_device first.")
        return self._runtime

    def _compiled(self, *shape: Hashable) -> None:
        self._opened().compile(*shape)
