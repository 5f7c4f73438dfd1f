"""Builds an EngineConfig from the user's settings, except what depends on the device."""

from __future__ import annotations

import sys

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    LoRAConfig,
    ParallelConfig,
    SchedulerConfig,
)
from mvllm.config.engine_settings import EngineSettings
from mvllm.config.keyword_arguments import listed_names
from mvllm.config.kv_events import read_kv_events_config
from mvllm.config.kv_transfer import read_kv_transfer_config
from mvllm.config.model import ModelConfig
from mvllm.config.model_builder import DTYPE_ALIASES
from mvllm.config.model_limits import check_parallel_sizes, token_budget
from mvllm.config.multimodal import MultiModalConfig, read_limits, read_media_folder, read_processor_kwargs

_KV_DTYPES = DTYPE_ALIASES | {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}


def build_engine_config(
    args: EngineSettings, model: ModelConfig, speculative: SpeculativeConfig | None
) -> EngineConfig:
    """The configuration of validated settings.

    Args:
        args: The settings.
        model: The model's part, made of them.
        speculative: The part of speculative decoding; None without it.

    Raises:
        ConfigError: A setting does not fit the model or the others.
    """
    tp = args.tensor_parallel_size
    check_parallel_sizes(model, tp, args.pipeline_parallel_size)
    if (draft := None if speculative is None else speculative.model) is not None:
        # The last stage holds it whole.
        check_parallel_sizes(draft, tp, 1, "the model's" if draft.model == args.model else f"{draft.model}'s")
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            block_size=args.block_size,
            memory_utilization=args.memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            dtype=_KV_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype),
            enable_prefix_caching=args.enable_prefix_caching and not model.kind.is_encoder,
            prefix_caching_seed=args.prefix_caching_seed,
            state_snapshot_interval=args.state_snapshot_interval,
        ),
        scheduler=_scheduler_config(args, model),
        parallel=_parallel_config(args),
        load=LoadConfig(load_format=args.load_format, use_tqdm=args.use_tqdm_on_load),
        lora=_lora_config(args),
        speculative=speculative,
        multimodal=_multimodal_config(args),
        kv_events=None if args.kv_events_config is None else read_kv_events_config(args.kv_events_config),
        platform=args.platform,
        enforce_eager=args.enforce_eager,
        op_providers=listed_names(args.op_providers),
        stat_loggers=listed_names(args.stat_loggers),
        log_stats=not args.disable_log_stats,
        logits_processors=listed_names(args.logits_processors),
        batch_invariant=args.batch_invariant,
        kv_transfer=read_kv_transfer_config(
            offloading_size=args.kv_offloading_size,
            disk_cache=args.kv_disk_cache,
            disk_cache_size=args.kv_disk_cache_size,
            preemption_mode=args.preemption_mode,
            settings=args.kv_transfer_config,
            role=args.kv_role,
        ),
    )


def _scheduler_config(args: EngineSettings, model: ModelConfig) -> SchedulerConfig:
    # Encoders attend bidirectionally: a prompt is computed in one step, without KV cache.
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=token_budget(
            model,
            args.max_num_batched_tokens,
            args.max_num_seqs,
            enable_chunked_prefill=args.enable_chunked_prefill,
        ),
        max_num_batched_tokens_is_default=args.max_num_batched_tokens is None,
        enable_chunked_prefill=args.enable_chunked_prefill and not model.kind.is_encoder,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        long_prefill_slowdown=args.long_prefill_slowdown,
        policy=args.scheduling_policy,
        async_scheduling=args.async_scheduling,
        max_queued_requests=sys.maxsize if args.max_queued_requests is None else args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
    )


def _parallel_config(args: EngineSettings) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=args.data_parallel_size,
        distributed_executor_backend=args.distributed_executor_backend,
        start_timeout=args.start_timeout,
        step_timeout=args.step_timeout,
        mq_num_slots=args.mq_num_slots,
        mq_slot_bytes=args.mq_slot_bytes,
        mq_spin_seconds=args.mq_spin_seconds,
        engine_core_process=args.engine_core_process,
        worker_extension_cls=args.worker_extension_cls,
    )


def _multimodal_config(args: EngineSettings) -> MultiModalConfig:
    return MultiModalConfig(
        limit_per_prompt=read_limits(args.limit_mm_per_prompt or {}),
        allowed_local_media_path=read_media_folder(args.allowed_local_media_path),
        allowed_media_domains=listed_names(args.allowed_media_domains) or None,
        fetch_timeout=args.media_fetch_timeout,
        max_media_bytes=args.max_media_bytes,
        max_pixels=args.max_media_pixels,
        max_audio_seconds=args.max_audio_seconds,
        processor_kwargs=read_processor_kwargs(args.mm_processor_kwargs or {}),
        processor_cache_bytes=int(args.mm_processor_cache_gb * 2**30),
        enable_embeds=args.enable_prompt_embeds,
        encoder_cache_tokens=args.encoder_cache_size,
        max_encoder_tokens=args.max_num_encoder_input_tokens,
        num_processes=args.mm_processor_processes,
        inflight_bytes=int(args.mm_inflight_gb * 2**30),
    )


def _lora_config(args: EngineSettings) -> LoRAConfig | None:
    if not args.enable_lora:
        return None
    return LoRAConfig(args.max_loras, args.max_lora_rank, args.max_cpu_loras or args.max_loras)
