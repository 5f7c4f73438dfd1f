"""Engine keywords that other engines have and mvllm does without: each is accepted, with its effect or one log line.

A script written for another engine passes settings that mvllm does not declare. `FOREIGN_KEYWORDS` lists those whose
meaning is known. A keyword either gives the value of a setting of mvllm (`setting`), or has no effect; if its value
asks for something that mvllm does not do, one warning says what happens instead (`instead`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvllm.errors import ConfigError
from mvllm.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class ForeignKeyword:
    """A keyword that is not a setting of mvllm.

    Attributes:
        instead: What mvllm does instead, as the rest of the sentence that begins with the keyword and its value.
        same: Values that ask for what mvllm does anyway: they need no warning. None and False never need one.
        setting: The setting that takes the value. `key` names an entry of that setting, which is then a dict.
        key: See `setting`.
    """

    instead: str = ""
    same: tuple[Any, ...] = ()
    setting: str | None = None
    key: str | None = None


_KINDS = "The model's files decide what it can do: one engine answers generation and pooling requests."
_PLATFORM = "The platform plugin decides this."
_ENCODERS = "Each tensor-parallel rank holds the whole encoder."
_SPECULATIVE = "Pass speculative_config={'method': ..., 'num_speculative_tokens': ...}."
_SERVER = "Give this to the server: `mvllm serve --help`."
_REPLICAS = "Engine cores are processes of this machine; distributed_executor_backend='ray' uses workers on several."
_MACHINE = "Workers are processes of this machine; distributed_executor_backend='ray' uses several."
_TRACING = "Pass --otlp-traces-endpoint to `mvllm serve`."

FOREIGN_KEYWORDS: Mapping[str, ForeignKeyword] = {
    # model
    "task": ForeignKeyword(_KINDS, ("auto", "generate", "embed", "embedding", "classify", "score", "reward")),
    "runner": ForeignKeyword(_KINDS, ("auto", "generate", "pooling")),
    "convert": ForeignKeyword(f"No model is converted. {_KINDS}", ("auto", "none", "embed")),
    "tokenizer_mode": ForeignKeyword("The tokenizer's files decide which class reads them.", ("auto", "hf", "slow")),
    "tokenizer_pool_size": ForeignKeyword("Long prompts are tokenized on threads.", (0,)),
    "tokenizer_pool_type": ForeignKeyword("Long prompts are tokenized on threads."),
    "tokenizer_pool_extra_config": ForeignKeyword("Long prompts are tokenized on threads."),
    "config_format": ForeignKeyword("The folder's files decide the format.", ("auto", "hf")),
    "hf_config_path": ForeignKeyword("config.json is read from the model's folder; hf_overrides replaces keys of it."),
    "code_revision": ForeignKeyword("`revision` applies to every file of the model, its code included."),
    "rope_scaling": ForeignKeyword(setting="hf_overrides", key="rope_scaling"),
    "rope_theta": ForeignKeyword(setting="hf_overrides", key="rope_theta"),
    "override_pooler_config": ForeignKeyword(setting="pooler_config"),
    "override_generation_config": ForeignKeyword("Pass SamplingParams, or generation_config=FOLDER."),
    "override_attention_dtype": ForeignKeyword(_PLATFORM),
    "disable_sliding_window": ForeignKeyword("Sliding windows are used wherever the model has them."),
    "disable_cascade_attn": ForeignKeyword("Equal prefixes are shared by the prefix cache alone.", (True,)),
    "logits_processor_pattern": ForeignKeyword("Logits processors are named by the setting logits_processors."),
    "served_model_name": ForeignKeyword(_SERVER),
    "media_io_kwargs": ForeignKeyword(
        "Frames of videos are chosen by num_frames or fps in mm_processor_kwargs.", ({},)
    ),
    "disable_mm_preprocessor_cache": ForeignKeyword("Set mm_processor_cache_gb to 0 for no cache."),
    "interleave_mm_strings": ForeignKeyword("Images stand where the parts of a message put them.", (True,)),
    "skip_mm_profiling": ForeignKeyword("Memory of encoders is counted from the model's shapes.", (True,)),
    "mm_processor_cache_type": ForeignKeyword("Each front end keeps processed items in its own memory.", ("lru",)),
    "mm_shm_cache_max_object_size_mb": ForeignKeyword("Each front end keeps processed items in its own memory."),
    "mm_encoder_only": ForeignKeyword("The language part is always loaded."),
    "mm_encoder_tp_mode": ForeignKeyword(_ENCODERS, ("data",)),
    "mm_encoder_attn_backend": ForeignKeyword(_PLATFORM),
    "video_pruning_rate": ForeignKeyword("Every sampled frame of a video is used.", (0, 0.0)),
    "enable_multimodal_encoder_data_parallel": ForeignKeyword(_ENCODERS),
    "io_processor_plugin": ForeignKeyword("Inputs and outputs are texts and token ids."),
    "quantization_config": ForeignKeyword(
        "The checkpoint's config.json describes quantized weights; `quantization` names a method for others."
    ),
    "allow_deprecated_quantization": ForeignKeyword("No quantization method is deprecated.", (True,)),
    # loading
    "download_dir": ForeignKeyword("Models are stored in the hub's cache; set HF_HUB_CACHE to move it."),
    "model_loader_extra_config": ForeignKeyword("Weights are read as load_format says.", ({},)),
    "ignore_patterns": ForeignKeyword("Only the files that mvllm reads are fetched."),
    "safetensors_load_strategy": ForeignKeyword("Weights are mapped from the files.", ("lazy",)),
    "max_parallel_loading_workers": ForeignKeyword("Every worker loads its own part."),
    "pt_load_map_location": ForeignKeyword("Weights are read to the host first."),
    "weight_transfer_config": ForeignKeyword("init_weight_transfer_engine() chooses the backend of a trainer's group."),
    "quantization_param_path": ForeignKeyword("Scales are read from the checkpoint."),
    # memory and cache
    "swap_space": ForeignKeyword("Host memory for preempted requests is kv_offloading_size.", (0,)),
    "prefix_caching_hash_algo": ForeignKeyword(
        "Block hashes are seeded; see prefix_caching_seed.", ("builtin", "sha256")
    ),
    "calculate_kv_scales": ForeignKeyword("Scales are computed for each token and head.", (True,)),
    "kv_sharing_fast_prefill": ForeignKeyword("Every layer computes the whole prompt."),
    "disable_hybrid_kv_cache_manager": ForeignKeyword("Layers of different windows have KV cache groups of their own."),
    "kv_offloading_backend": ForeignKeyword("Workers copy blocks to host memory.", ("native",)),
    "ec_transfer_config": ForeignKeyword("Engines do not exchange caches."),
    "offload_backend": ForeignKeyword("Weights stay on the device.", ("auto",)),
    "cpu_offload_gb": ForeignKeyword("Weights stay on the device.", (0, 0.0)),
    "cpu_offload_params": ForeignKeyword("Weights stay on the device."),
    "mamba_cache_dtype": ForeignKeyword("States have the model's dtype.", ("auto",)),
    "mamba_ssm_cache_dtype": ForeignKeyword("States have the model's dtype.", ("auto",)),
    "mamba_block_size": ForeignKeyword("Blocks of every layer have the size block_size."),
    "mamba_cache_mode": ForeignKeyword("The prefix cache holds what the model's layers permit.", ("none",)),
    "enable_sleep_mode": ForeignKeyword("sleep() needs no setting.", (True,)),
    # scheduler
    "scheduler_cls": ForeignKeyword("scheduling_policy is 'fcfs' or 'priority'."),
    "scheduler_delay_factor": ForeignKeyword("Waiting requests are scheduled at once.", (0,)),
    "num_scheduler_steps": ForeignKeyword("Steps overlap instead; see async_scheduling.", (1,)),
    "num_lookahead_slots": ForeignKeyword(_SPECULATIVE, (0,)),
    "multi_step_stream_outputs": ForeignKeyword("Every step returns its outputs.", (True,)),
    "disable_async_output_proc": ForeignKeyword("async_scheduling=False plans one step at a time."),
    "disable_chunked_mm_input": ForeignKeyword("Chunks of a prompt may end within an image."),
    "max_num_scheduled_tokens": ForeignKeyword("max_num_batched_tokens is the limit of a step."),
    "scheduler_reserve_full_isl": ForeignKeyword("A prompt starts when the whole of it has blocks.", (True,)),
    "prefill_schedule_interval": ForeignKeyword("Prompts are scheduled in every step.", (1,)),
    "watermark": ForeignKeyword("Each running request has a block left when another one starts.", (0, 0.0)),
    "stream_interval": ForeignKeyword("Each step's tokens can be read at once, and unread ones together.", (1,)),
    "performance_mode": ForeignKeyword(
        "docs/how-to/tune.md names the settings for latency and throughput.", ("balanced",)
    ),
    "use_v2_block_manager": ForeignKeyword("There is one block manager.", (True,)),
    # several devices
    "enable_expert_parallel": ForeignKeyword(
        "Each expert is split over the ranks of tensor parallelism; each data-parallel replica holds all experts."
    ),
    "enable_eplb": ForeignKeyword("Experts stay where they were loaded."),
    "eplb_config": ForeignKeyword("Experts stay where they were loaded."),
    "expert_placement_strategy": ForeignKeyword("Experts stay where they were loaded.", ("linear",)),
    "num_redundant_experts": ForeignKeyword("Experts stay where they were loaded.", (0,)),
    "eplb_window_size": ForeignKeyword("Experts stay where they were loaded."),
    "eplb_step_interval": ForeignKeyword("Experts stay where they were loaded."),
    "eplb_log_balancedness": ForeignKeyword("Experts stay where they were loaded."),
    "enable_elastic_ep": ForeignKeyword("The number of ranks is that of the start."),
    "all2all_backend": ForeignKeyword(_PLATFORM),
    "moe_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "dcp_kv_cache_interleave_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "cp_kv_cache_interleave_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "dcp_comm_backend": ForeignKeyword("A sequence is not split over ranks."),
    "nnodes": ForeignKeyword(_MACHINE, (1,)),
    "node_rank": ForeignKeyword(_MACHINE, (0,)),
    "master_addr": ForeignKeyword(_MACHINE, ("127.0.0.1",)),
    "master_port": ForeignKeyword(_MACHINE),
    "data_parallel_hybrid_lb": ForeignKeyword(_REPLICAS),
    "data_parallel_external_lb": ForeignKeyword(_REPLICAS),
    "numa_bind": ForeignKeyword(_PLATFORM),
    "decode_context_parallel_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "prefill_context_parallel_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "data_parallel_backend": ForeignKeyword(_REPLICAS, ("mp",)),
    "data_parallel_size_local": ForeignKeyword(_REPLICAS),
    "data_parallel_rank": ForeignKeyword(_REPLICAS),
    "data_parallel_start_rank": ForeignKeyword(_REPLICAS),
    "data_parallel_address": ForeignKeyword(_REPLICAS),
    "data_parallel_rpc_port": ForeignKeyword(_REPLICAS),
    "disable_custom_all_reduce": ForeignKeyword(_PLATFORM, (True,)),
    "worker_cls": ForeignKeyword("The platform plugin provides the worker.", ("auto",)),
    "worker_use_ray": ForeignKeyword("distributed_executor_backend names the executor."),
    "enable_dbo": ForeignKeyword("Batches are not divided."),
    "ubatch_size": ForeignKeyword("Batches are not divided.", (0,)),
    "dbo_decode_token_threshold": ForeignKeyword("Batches are not divided."),
    "dbo_prefill_token_threshold": ForeignKeyword("Batches are not divided."),
    # compilation and device
    "device": ForeignKeyword("The setting `platform` chooses the platform plugin.", ("auto",)),
    "compilation_config": ForeignKeyword(
        "The platform decides what it captures or compiles; enforce_eager=True turns it off.", ({},)
    ),
    "optimization_level": ForeignKeyword(
        "The platform decides what it captures or compiles; enforce_eager=True turns it off."
    ),
    "max_seq_len_to_capture": ForeignKeyword(_PLATFORM),
    "max_context_len_to_capture": ForeignKeyword(_PLATFORM),
    "attention_backend": ForeignKeyword("The platform chooses an attention backend for the model.", ("auto",)),
    "attention_config": ForeignKeyword("The platform chooses an attention backend for the model."),
    "kernel_config": ForeignKeyword("op_providers names installed sets of kernels."),
    "additional_config": ForeignKeyword("Platform plugins read environment variables of their own.", ({},)),
    # LoRA
    "fully_sharded_loras": ForeignKeyword("Adapters are split as the layers are."),
    "enable_tower_connector_lora": ForeignKeyword("Adapters apply to the language part of a model."),
    "specialize_active_lora": ForeignKeyword(_PLATFORM),
    "lora_dtype": ForeignKeyword("Adapters have the model's dtype.", ("auto",)),
    "lora_extra_vocab_size": ForeignKeyword("Adapters do not extend the vocabulary.", (0, 256)),
    "long_lora_scaling_factors": ForeignKeyword("Adapters do not change the context length."),
    "enable_lora_bias": ForeignKeyword("Adapters with a bias are refused when they are loaded."),
    "qlora_adapter_name_or_path": ForeignKeyword("Pass a LoRARequest."),
    "default_mm_loras": ForeignKeyword("Pass a LoRARequest."),
    # speculative decoding, structured outputs, reasoning
    "speculative_model": ForeignKeyword(_SPECULATIVE),
    "num_speculative_tokens": ForeignKeyword(_SPECULATIVE),
    "ngram_prompt_lookup_max": ForeignKeyword(_SPECULATIVE),
    "ngram_prompt_lookup_min": ForeignKeyword(_SPECULATIVE),
    "guided_decoding_backend": ForeignKeyword("One grammar library serves every request.", ("auto", "xgrammar")),
    "guided_decoding_disable_fallback": ForeignKeyword("There is no fallback.", (True,)),
    "guided_decoding_disable_any_whitespace": ForeignKeyword("JSON outputs may have spaces."),
    "guided_decoding_disable_additional_properties": ForeignKeyword("The JSON schema decides."),
    "structured_outputs_config": ForeignKeyword("One grammar library serves every request.", ({}, {"backend": "auto"})),
    "enable_reasoning": ForeignKeyword(_SERVER),
    "reasoning_parser": ForeignKeyword(_SERVER, ("",)),
    "reasoning_parser_plugin": ForeignKeyword("Parsers of other packages are entry points.", ("",)),
    "reasoning_config": ForeignKeyword("SamplingParams(thinking_tags=...) names the texts around thoughts."),
    "chat_template": ForeignKeyword("Pass chat_template to LLM.chat, or --chat-template to `mvllm serve`."),
    # statistics and logs
    "enable_log_requests": ForeignKeyword("Prompts are never logged."),
    "disable_log_requests": ForeignKeyword("Prompts are never logged.", (True,)),
    "max_log_len": ForeignKeyword("Prompts are never logged."),
    "aggregate_engine_logging": ForeignKeyword("The load of all replicas is logged together.", (True,)),
    "enable_logging_iteration_details": ForeignKeyword("Steps are not logged."),
    "kv_cache_metrics": ForeignKeyword("Metrics have the usage of the KV cache and the hits of the prefix cache."),
    "kv_cache_metrics_sample": ForeignKeyword("Metrics are counted for every request."),
    "enable_mfu_metrics": ForeignKeyword("Floating-point operations are not counted."),
    "enable_return_routed_experts": ForeignKeyword("Outputs have no routing of experts."),
    "show_hidden_metrics_for_version": ForeignKeyword("There are no hidden metrics."),
    "otlp_traces_endpoint": ForeignKeyword(_TRACING),
    "collect_detailed_traces": ForeignKeyword(_TRACING),
    "profiler_config": ForeignKeyword("start_profile() writes to the folder $MVLLM_TORCH_PROFILER_DIR."),
}
"""Accepted keywords by name. Their defaults in other engines are among `same`."""


def translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the foreign ones replaced by settings of mvllm, or dropped with a warning.

    Raises:
        ConfigError: A foreign keyword and the setting that it stands for are both given, with different values.
    """
    found = {name: value for name, value in given.items() if name not in FOREIGN_KEYWORDS}
    for name, value in given.items():
        keyword = FOREIGN_KEYWORDS.get(name)
        if keyword is None or value is None:
            continue
        if keyword.setting is not None:
            _store(found, name, keyword, value)
        elif not _is_same(value, keyword.same):
            logger.warning("%s=%.80r has no effect. %s", name, value, keyword.instead)
    return found


def _store(found: dict[str, Any], name: str, keyword: ForeignKeyword, value: Any) -> None:
    setting = str(keyword.setting)
    if keyword.key is not None:
        present = found.get(setting) or {}
        value = {keyword.key: value, **present} if isinstance(present, Mapping) else present
    elif found.get(setting) not in (None, value):
        raise ConfigError(f"{name} and {setting} are the same setting, and differ. Pass {setting} alone.")
    found[setting] = value


def _is_same(value: Any, same: tuple[Any, ...]) -> bool:
    """Whether the value asks for what mvllm does anyway. True is not 1."""
    return value is False or any(type(value) is type(each) and value == each for each in same)
