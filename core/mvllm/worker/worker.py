"""The worker of platforms with torch tensors: binds the device, loads the model, measures memory, and runs steps."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from mvllm.config.engine_config import EngineConfig
from mvllm.distributed.parallel_groups import ParallelGroups, join_groups
from mvllm.errors import EngineSleepingError, RequestError
from mvllm.messages.lora import LoRARequest
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate
from mvllm.platform.checked_calls import call_checked, check_kv_transfer
from mvllm.platform.host_memory import free_host_memory
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_protocol import HostBlockNeeds, KVCacheNeeds
from mvllm.worker.host_weights import HostWeights
from mvllm.worker.model_runner import ModelRunner
from mvllm.worker.weight_updater import WeightUpdater

_PROFILE_DIVISOR = 16
"""On the host, the profile run is a step this many times smaller than the largest."""

_MARGIN = 1.25
"""Factor on results of the small profile run: resident memory is counted in pages and chunks."""

_MIN_TOKENS_FOR_SMALL_PROFILE = 1024
"""Below this `max_num_batched_tokens` the profile run is the largest step."""

_RESET_SLACK = 1 << 22
"""Bytes by which a peak that was just reset may exceed the memory in use."""


class Worker:
    """WorkerProtocol for every platform whose tensors are torch tensors.

    Args:
        config: The engine's configuration.
        platform: The platform that owns the device.
        ctx: Which worker this is.

    Attributes:
        runner_class: Runs the steps. A worker of another package replaces it.
    """

    runner_class: ClassVar[type[ModelRunner]] = ModelRunner

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        self._config = config
        self._platform = platform
        self._ctx = ctx
        self._runtime: DeviceRuntime | None = None
        self._groups: ParallelGroups | None = None
        self._runner: ModelRunner | None = None
        self._updater: WeightUpdater | None = None
        self._host_weights: HostWeights | None = None  # while the weights sleep at level 1
        self._thread = threading.get_ident()  # that made the last call

    def init_device(self) -> None:
        self._thread = threading.get_ident()
        self._runtime = call_checked(self._platform, "init_device", self._ctx, returns=DeviceRuntime)
        self._groups = join_groups(self._config.parallel, self._platform, self._ctx, self._runtime.device)
        self._runner = self.runner_class(
            self._config,
            self._platform,
            self._runtime,
            self._groups.tp,
            self._groups.pp,
            every_rank_answers=self._ctx.every_rank_answers,
            num_devices=self._ctx.num_devices,
            rank=self._ctx.rank,
        )
        self._updater = WeightUpdater(self._runner.loader.start_weight_update, self._runtime, self._ctx.rank)

    def load_model(self) -> None:
        self.runner.load_model()

    def kv_cache_needs(self) -> KVCacheNeeds:
        return self.runner.kv_cache_needs()

    def available_kv_bytes(self) -> int:
        """Bytes for the KV cache: the allowed share of the device, less the memory in use, less the peak of a step.

            total ├── reserve (1 - utilization) ──┤── in use now ──┤── peak of a step ──┤── KV cache ──┤

        The results of encoders that a worker keeps count to the peak.

        With unified memory, all workers of this machine share what is free, and the reserve is a share of what other
        programs leave: they use their memory already.
        """
        runtime = self.runtime
        runtime.synchronize()
        before = runtime.memory()
        peak = max(self._peak_step_bytes(), self._peak_call_bytes(), self._peak_encoder_bytes())
        peak += self.runner.encoder_cache_bytes()
        runtime.release_cached_memory()
        utilization = self._config.cache.memory_utilization
        assert utilization is not None, "resolved before start"
        unified = self._platform.capabilities.unified_memory
        sharers = self._ctx.local_world_size if unified else 1
        # The machine's other workers are not other programs: each uses about as much as this one.
        usable = min(before.total, before.free + sharers * before.used_by_me) if unified else before.total
        reserve = int(usable * (1 - utilization))
        # Workers of other replicas may still be loading.
        loading = (sharers - sharers // self._config.parallel.data_parallel_size) * before.used_by_me if unified else 0
        return (before.free - loading - reserve) // sharers - peak

    def _peak_step_bytes(self) -> int:
        """The most bytes that a step takes in addition to the memory in use.

        With `Capabilities.scaled_memory_profile` a small step is measured: memory for tokens and requests grows with
        their number, and memory that does not is counted several times, which is on the safe side. An even smaller step
        before it measures what only the first step takes, and what stays allocated after that.
        """
        runtime, scheduler = self.runtime, self._config.scheduler
        runtime.reset_peak_memory()
        start = runtime.memory()
        is_large = (
            scheduler.max_num_batched_tokens >= _MIN_TOKENS_FOR_SMALL_PROFILE
            and scheduler.max_num_seqs >= _PROFILE_DIVISOR
        )
        is_scaled = is_large and self._platform.capabilities.scaled_memory_profile
        if not is_scaled or start.peak_by_me > start.used_by_me + _RESET_SLACK:
            return self._peak_step_bytes_of(1)
        first = self._peak_step_bytes_of(4 * _PROFILE_DIVISOR)
        runtime.release_cached_memory()
        kept = max(0, runtime.memory().used_by_me - start.used_by_me)
        return max(first, kept + int(self._peak_step_bytes_of(_PROFILE_DIVISOR) * _PROFILE_DIVISOR * _MARGIN))

    def _peak_step_bytes_of(self, divisor: int) -> int:
        """Peak bytes of a step that is `divisor` times smaller than the largest."""
        runtime = self.runtime
        runtime.reset_peak_memory()
        before = runtime.memory().used_by_me
        self.runner.profile(divisor)
        return max(0, runtime.memory().peak_by_me - before)

    def _peak_call_bytes(self) -> int:
        """As `_peak_step_bytes`, for a call of the model. Not measured on the host, where it takes seconds."""
        model, runtime = self.runner.loader.model, self.runtime
        if self._platform.capabilities.unified_memory or not model.remote_methods:
            return 0
        runtime.reset_peak_memory()
        before = runtime.memory().used_by_me
        model.run_largest_call()
        runtime.synchronize()
        return max(0, runtime.memory().peak_by_me - before)

    def _peak_encoder_bytes(self) -> int:
        """As `_peak_call_bytes`, for encoding the largest item, where the encoder gives one."""
        if self._platform.capabilities.unified_memory:
            return 0
        runtime = self.runtime
        runtime.reset_peak_memory()
        before = runtime.memory().used_by_me
        self.runner.encode_largest_item()
        return max(0, runtime.memory().peak_by_me - before)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.runner.update_max_model_len(max_model_len)

    def group_layers(self, windows: list[int | None]) -> None:
        self.runner.group_layers(windows)

    def allocate_states(self, num_slots: int) -> None:
        self.runner.allocate_states(num_slots)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self.runner.allocate_kv_cache(num_blocks, block_size)

    def host_block_needs(self) -> HostBlockNeeds:
        check_kv_transfer(self._platform)
        return self.runner.host_blocks.needs()

    def map_host_blocks(
        self,
        path: str,
        num_blocks: int,
        rank_bytes: list[int],
        states_path: str,
        num_states: int,
        state_rank_bytes: list[int],
    ) -> None:
        self.runner.host_blocks.map(path, num_blocks, rank_bytes, states_path, num_states, state_rank_bytes)

    def warm_up(self) -> None:
        """Runs steps before the first request, so that no request waits for a compilation or a capture."""
        self.runner.warm_up()

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(plan)

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        return self.runner.sample_tokens(step, mask_rows, token_masks)

    def collect_output(self, step: int) -> ModelRunnerOutput:
        return self.runner.collect_output(step)

    def get_model(self) -> Any:
        """The model, with this rank's share of the weights.

        Raises:
            EngineSleepingError: They are not on the device.
        """
        if self._host_weights is not None or not self.runner.loader.is_loaded:
            raise EngineSleepingError("The weights sleep. Wake them up (wake_up) before using the model.")
        return self.runner.loader.model

    def check_sleep(self, level: int) -> None:
        weights = self._weights_to_offload(level)
        if weights is None:
            return
        self.runtime.release_cached_memory()
        num_workers, free = self._ctx.local_world_size, free_host_memory()
        if weights.num_bytes * num_workers > free:
            raise RequestError(
                f"Sleep level 1 keeps the weights in host memory: {num_workers} workers on this host need about "
                f"{weights.num_bytes * num_workers / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free. Use level 2, "
                "which drops the weights and reads the checkpoint again, or free memory on the host.",
                parameter="level",
            )

    def sleep(self, level: int) -> None:
        self.runner.sleep(drop_weights=level > 1)
        if level > 1:
            self._host_weights = None
        elif (weights := self._weights_to_offload(level)) is not None:
            weights.offload()
            self._host_weights = weights
        self.runtime.release_cached_memory()

    def wake_up(self, tags: list[str]) -> None:
        if "weights" in tags and self._host_weights is not None:
            self._host_weights.restore()
            self._host_weights = None
            self.runtime.release_cached_memory()  # the host's buffers
        self.runner.wake_up(tags)

    def _weights_to_offload(self, level: int) -> HostWeights | None:
        """The weights that a sleep of this level copies to the host; None if it copies none."""
        loader = self.runner.loader
        owners = [] if self._host_weights is not None else loader.weight_owners
        if level > 1 or not owners or not self._platform.capabilities.offloads_weights:
            return None
        return HostWeights(owners, self.runtime, loader.caches)

    def add_lora(self, request: LoRARequest) -> None:
        self.runner.loader.lora_manager.add_adapter(request)

    def remove_lora(self, lora_int_id: int) -> None:
        self.runner.loader.lora_manager.remove_adapter(lora_int_id)

    def init_weight_transfer(self, info: WeightTransferInfo) -> None:
        self.updater.join(info)

    def has_joined_weight_transfer(self, give_up: bool) -> bool:
        return self.updater.has_joined(give_up=give_up)

    def start_weight_update(self) -> None:
        self.updater.start()

    def check_weights(self, update: WeightUpdate) -> None:
        self.updater.check(update)

    def update_weights(self, update: WeightUpdate) -> None:
        self.updater.update(update)

    def check_weight_update(self, whole: bool) -> None:
        self.updater.check_complete(whole=whole)

    def finish_weight_update(self) -> bool:
        moved = self.updater.finish()
        if moved:
            self.runner.drop_captured_steps()
        return moved

    def abandon_weight_update(self) -> None:
        self.updater.abandon()

    def call_model(self, method: str, args: list[Any]) -> Any:
        model = self.runner.loader.model
        if method not in model.remote_methods:
            raise RequestError(f"{type(model).__name__} has no method {method!r}.", parameter="model")
        return getattr(model, method)(*args)

    def check_health(self) -> None:
        self.runtime.health()

    def shutdown(self) -> None:
        self._bind_thread()
        if self._updater is not None:
            self._updater.leave()
            self._updater = None
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if self._runtime is not None:
            self._runtime.shutdown()
            self._runtime = None

    def _bind_thread(self) -> None:
        """Follows callers into other threads."""
        thread = threading.get_ident()
        if thread != self._thread and self._runtime is not None:
            self._thread = thread
            self._runtime.bind_thread()

    @property
    def runtime(self) -> DeviceRuntime:
        assert self._runtime is not None, "init_device has not been called"
        self._bind_thread()
        return self._runtime

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "init_device has not been called"
        self._bind_thread()
        return self._runner

    @property
    def updater(self) -> WeightUpdater:
        assert self._updater is not None, "init_device has not been called"
        self._bind_thread()
        return self._updater
