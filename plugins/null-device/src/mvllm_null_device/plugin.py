"""The whole plugin: a platform without a device, and a worker that returns arbitrary tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mvllm.plugin_api import (
    AttentionSpec,
    Capabilities,
    EngineConfig,
    GroupSpec,
    KVCacheNeeds,
    LaunchTopology,
    ModelRunnerOutput,
    ParallelConfig,
    Plan,
    Platform,
    PlatformError,
    PlatformSpec,
    ProbeResult,
    SchedulerOutput,
    WorkerContext,
    hookimpl,
)

if TYPE_CHECKING:
    import torch

SPEC = PlatformSpec(
    name="null",
    vendor="mvllm",
    contract=(1, 0),
    probe="mvllm_null_device.plugin:probe",
    factory="mvllm_null_device.plugin:NullPlatform",
    by_name_only=True,
)
TOKEN = 7


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The platform's PlatformSpec."""
    return SPEC


def probe() -> ProbeResult:
    """Always available."""
    return ProbeResult(True, "computes nothing, anywhere")


class NullPlatform(Platform):
    """A platform without tensors; methods of the contract that need a device raise."""

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        dtypes = ("float32", "bfloat16", "float16")
        return Capabilities(
            dtypes=dtypes,
            kv_dtypes=dtypes,
            torch_device=False,
            fork_safe=True,
            devices_per_process=None,
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
        )

    def plan(self, config: EngineConfig) -> Plan:
        return Plan()

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        return LaunchTopology(parallel.world_size, 1, executors=("uni", "mp", "external_launcher", "ray"))

    def worker_class(self) -> str:
        return "mvllm_null_device.plugin:NullWorker"

    def init_device(self, ctx: WorkerContext) -> NoReturn:
        raise PlatformError("The platform 'null' has no device.")

    def communicator(self, group: GroupSpec, device: torch.device) -> NoReturn:
        raise PlatformError("The platform 'null' has nothing to communicate.")

    def attention_backend(self, spec: AttentionSpec) -> NoReturn:
        raise PlatformError("The platform 'null' has no attention.")


class NullWorker:
    """WorkerProtocol without a model: every row at the end of its known tokens gets the same token."""

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        self._left: dict[int, int] = {}  # known tokens still to be computed, of rows that have more than one

    def init_device(self) -> None:
        """No device to bind."""

    def load_model(self) -> None:
        """No model to load."""

    def kv_cache_needs(self) -> KVCacheNeeds:
        return KVCacheNeeds(bytes_per_token=1, block_sizes=(16, 32, 64, 128, 8))

    def available_kv_bytes(self) -> int:
        return 1 << 30

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """No memory is allocated."""

    def warm_up(self) -> None:
        """Nothing to compile."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for row in plan.freed_rows:
            self._left.pop(row, None)
        for request in plan.new_requests:
            self._left[request.row] = len(request.token_ids) - request.num_computed_tokens
        tokens = [TOKEN] * len(plan.rows)
        if self._left:
            for i, (row, computed) in enumerate(zip(plan.rows, plan.num_scheduled_tokens, strict=True)):
                left = self._left.pop(row, computed) - computed
                if left > 0:
                    self._left[row], tokens[i] = left, -1
        return ModelRunnerOutput(step=plan.step, sampled_token_ids=tokens)

    def collect_output(self, step: int) -> ModelRunnerOutput:
        return ModelRunnerOutput(step=step)

    def check_health(self) -> None:
        """Never fails."""

    def shutdown(self) -> None:
        """Nothing to release."""
