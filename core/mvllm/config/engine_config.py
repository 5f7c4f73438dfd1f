"""EngineConfig: the engine's configuration as frozen dataclasses. A platform's `plan` may change it before start."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, cast

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.kv_events import KVEventsConfig
from mvllm.config.kv_transfer import KVTransferConfig
from mvllm.config.model import ModelConfig
from mvllm.config.multimodal import MultiModalConfig
from mvllm.errors import ConfigError


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: Tokens per block; None for the attention backend's preferred size.
        memory_utilization: Share of the device's memory that weights, activations and KV cache together may use;
            None until the platform's plan is applied.
        kv_cache_memory_bytes: Bytes for the KV cache of each worker; None to measure the free memory.
        dtype: Storage dtype of keys and values by name; `auto` is the model's.
        enable_prefix_caching: Reuse the KV of equal prompt prefixes.
        prefix_caching_seed: Makes block hashes reproducible across runs; None draws a random root.
        state_snapshot_interval: Of models with sequence states: a state is kept for other requests every so many
            tokens; 0 for the ends of prompts only (since contract 1.1).
    """

    block_size: int | None = None
    memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    dtype: str = "auto"
    enable_prefix_caching: bool = True
    prefix_caching_seed: int | None = None
    state_snapshot_interval: int = 512


MIN_SNAPSHOT_TOKENS = 512
"""Least number of tokens per snapshot of a state that memory is divided by."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Continuous batching.

    Attributes:
        max_num_seqs: Most sequences running at once, and most rows in one step.
        max_num_batched_tokens: Token budget of one step.
        enable_chunked_prefill: Let a prompt be computed over several steps.
        policy: `fcfs` (first come, first served) or `priority`.
        async_scheduling: Plan step N + 1 while step N runs; None for the default of the platform's capabilities.
        max_queued_requests: Most sequences that may wait in AsyncLLM beyond those that can run at once. EngineArgs sets
            sys.maxsize (no limit) by default.
        max_queued_tokens: Most prompt tokens of all in-flight requests in AsyncLLM; None for any number.
        long_prefill_token_threshold: Most tokens of long prompts, which are computed one after the other, in a step
            while other requests have tokens to compute; None for half of `max_num_batched_tokens`, 0 for no limit. If
            given, a step in which requests generate has no more of them, even if the budget is not used up.
        max_long_partial_prefills: Always 1. Deprecated: platforms written for contract 1.1 may read it until 2.0.
        max_num_partial_prefills: Always None. Deprecated likewise.
        long_prefill_slowdown: A prompt of more than four whole steps may make a step in which requests generate this
            many times as long; None or 0 for no limit. Plans then depend on the time that steps take.
        max_num_batched_tokens_is_default: The user has not set `max_num_batched_tokens`, so a platform may choose what
            its devices can use (since contract 1.1).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_long_partial_prefills: int = 1
    max_num_partial_prefills: int | None = None
    long_prefill_slowdown: float | None = None
    max_num_batched_tokens_is_default: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism, executor and timeouts.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Pipeline stages, each with a contiguous range of layers.
        data_parallel_size: Engine replicas.
        data_parallel_rank: Index of this replica; the replicas' workers use the machine's devices in this order.
        distributed_executor_backend: Name of a built-in or installed executor, a dotted path, or None to choose.
        start_timeout: Seconds that each phase of start-up may take on a worker process.
        step_timeout: Seconds after which an unfinished step counts as hung, which stops the engine.
        mq_num_slots: Slots of each message queue to worker processes.
        mq_slot_bytes: Largest message to them that goes through shared memory; a reply's slot is a quarter of it.
        mq_spin_seconds: Longest busy wait for a message before sleeping; 0 for none.
        engine_core_process: Whether the engine core has a process of its own; None to choose.
        worker_extension_cls: A class whose methods are added to the worker's class, as `module:class` or dotted path.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    distributed_executor_backend: str | None = None
    start_timeout: float = 1800.0
    step_timeout: float = 300.0
    mq_num_slots: int = 10
    mq_slot_bytes: int = 1 << 20
    mq_spin_seconds: float = 100e-6
    engine_core_process: bool | None = None
    worker_extension_cls: str | None = None

    @property
    def world_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class LoadConfig:
    """Source of the weights.

    Attributes:
        load_format: `dummy` fills in small random weights; all others read the checkpoint in the form that they name.
        use_tqdm: Show progress while loading.
    """

    load_format: str = "auto"
    use_tqdm: bool = True


@dataclass(frozen=True)
class LoRAConfig:
    """Limits of LoRA adapters.

    Attributes:
        max_loras: Most different adapters of running requests; the number of adapter slots on the device.
        max_lora_rank: Largest rank of an adapter.
        max_cpu_loras: Most adapters that each worker keeps in the host's memory, at least `max_loras`.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 1


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of one engine.

    Attributes:
        lora: LoRA limits; None if LoRA is disabled.
        speculative: Speculative decoding; None if it is disabled.
        platform: Name of the platform, or None to choose the only available one.
        enforce_eager: Never capture graphs or compile.
        op_providers: Names of installed sets of op providers to use before the platform's.
        stat_loggers: Names of installed stat loggers.
        log_stats: Whether a server logs its load.
        logits_processors: Installed logits processors by name, or classes as `module:Class`, in the order in which they
            change logits.
        batch_invariant: The log-probabilities of a request have the same bits whatever else is in the batch, however
            its prompt was cut or found in the prefix cache, preempted or not, with draft tokens or not (since contract
            1.1).
        kv_transfer: Where keys and values are kept beside the device (since contract 1.1).
        kv_events: Publication of KV cache events; None if there is none (since contract 1.1).
        multimodal: Settings of images and audio as input (since contract 1.1).
    """

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    load: LoadConfig = LoadConfig()
    lora: LoRAConfig | None = None
    speculative: SpeculativeConfig | None = None
    platform: str | None = None
    enforce_eager: bool = False
    op_providers: tuple[str, ...] = ()
    stat_loggers: tuple[str, ...] = ()
    logits_processors: tuple[str, ...] = ()
    log_stats: bool = True
    batch_invariant: bool = False
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    kv_events: KVEventsConfig | None = None
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)


def with_max_model_len(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """`config`, or a copy with another length of the longest sequence."""
    if config.model.max_model_len == max_model_len:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=max_model_len))


def replace_field(config: EngineConfig, field: str, value: Any) -> EngineConfig:
    """A copy of `config` with one setting changed.

    Args:
        field: Dotted name, for instance `cache.block_size`.
        value: Its new value.

    Raises:
        ConfigError: There is no such field, or the value is not of its type.
    """
    field = str(field)  # a plugin may pass any type
    section_name, _, name = field.partition(".")
    if not name:
        return _replace(config, field, value, field)
    section = getattr(config, section_name, None)
    return _replace(config, section_name, _replace(section, name, value, field), field)


def _replace(values: Any, name: str, value: Any, field: str) -> Any:
    if not dataclasses.is_dataclass(values) or name not in {f.name for f in dataclasses.fields(values)}:
        raise ConfigError(f"There is no setting {field!r}.")
    permitted = typing.get_type_hints(type(values))[name]
    if isinstance(permitted, type | types.UnionType) and not _is_a(value, permitted):
        raise ConfigError(f"The setting {field!r} takes {permitted}, found {value!r}.")
    return dataclasses.replace(cast(Any, values), **{name: value})


def _is_a(value: object, permitted: Any) -> bool:
    """Whether `value` has the permitted type. An int is a float too, but a bool is not an int."""
    if isinstance(value, bool):
        return permitted is bool or bool in typing.get_args(permitted)
    return isinstance(value, permitted) or (isinstance(value, int) and isinstance(0.0, permitted))
