"""The keywords of LLM, for type checkers, completion and `help`: the settings of EngineArgs.

The settings are declared in `engine_settings` and `multimodal_args`. A type checker reads names and types from this
class alone; a test compares them with the declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

from mvllm.config.engine_args import EngineArgs

_Init = TypeVar("_Init", bound=Callable[..., None])


class EngineKeywords(TypedDict, total=False):
    """Every setting but `model`, and its other names. Some take more types than the setting has in the end."""

    tokenizer: str | os.PathLike[str] | None
    skip_tokenizer_init: bool
    trust_remote_code: bool
    model_impl: str
    revision: str | None
    tokenizer_revision: str | None
    hf_token: str | None
    hf_overrides: dict[str, Any] | None
    dtype: Any
    quantization: str | None
    max_model_len: int | Literal["auto"] | None
    seed: int | None
    max_logprobs: int
    logprobs_mode: str
    generation_config: str | os.PathLike[str]
    pooler_config: dict[str, Any] | None
    speculative_config: dict[str, Any] | None
    enforce_eager: bool
    batch_invariant: bool
    memory_utilization: float | None
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    block_size: int | None
    enable_prefix_caching: bool
    prefix_caching_seed: int | None
    kv_events_config: dict[str, Any] | None
    state_snapshot_interval: int
    kv_offloading_size: float | None
    kv_disk_cache: str | None
    kv_disk_cache_size: float | None
    kv_transfer_config: dict[str, Any] | None
    kv_role: str | None
    preemption_mode: str
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int | None
    long_prefill_slowdown: float | None
    scheduling_policy: str
    async_scheduling: bool | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    distributed_executor_backend: str | None
    start_timeout: float
    step_timeout: float
    mq_num_slots: int
    mq_slot_bytes: int
    mq_spin_seconds: float
    engine_core_process: bool | None
    worker_extension_cls: str | None
    load_format: str
    use_tqdm_on_load: bool
    limit_mm_per_prompt: dict[str, Any] | None
    allowed_local_media_path: str | None
    allowed_media_domains: str | Sequence[str] | None
    media_fetch_timeout: float
    max_media_bytes: int
    max_media_pixels: int
    max_audio_seconds: float
    mm_processor_kwargs: dict[str, Any] | None
    mm_processor_cache_gb: float
    mm_processor_processes: int
    mm_inflight_gb: float
    max_num_encoder_input_tokens: int | None
    encoder_cache_size: int | None
    enable_prompt_embeds: bool
    enable_mm_embeds: bool
    language_model_only: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    platform: str | None
    op_providers: str | None
    stat_loggers: str | None
    disable_log_stats: bool
    logits_processors: str | Sequence[str | type] | None


def with_every_setting(init: _Init) -> _Init:
    """A decorator of a constructor with `model` and EngineKeywords: `inspect.signature` lists the keywords."""
    own = inspect.signature(init)
    first = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    cast(Any, init).__signature__ = own.replace(parameters=[*first, *_keyword_parameters()])
    return init


def _keyword_parameters() -> list[inspect.Parameter]:
    """One per setting, from the fields alone: listing the settings would ask for installed packages."""
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=hint.__forward_arg__
        )
        for name, hint in EngineKeywords.__annotations__.items()
        if name in fields  # not the second names
    ]
