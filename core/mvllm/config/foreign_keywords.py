"""Engine keywords that other engines have and mvllm does without: each is accepted, with its effect or one log line.

A script written for another engine passes settings that mvllm does not declare. `FOREIGN_KEYWORDS` lists those whose
meaning is known. A keyword either gives the value of a setting of mvllm (`setting`), or has no effect; if its value
asks for something that mvllm does not do, one warning says what happens instead (`instead`). Where doing without would
change what a user relies on, the keyword is an error (`is_refused`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

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
        factor_of: The setting that a value is a factor of. Without that setting the value has no effect.
        kind: What the option takes on a command line: one value, nothing (`flag`, with `--no-...`), or a `list`.
        is_refused: Whether a value that is not among `same` is an error instead of a warning.
    """

    instead: str = ""
    same: tuple[Any, ...] = ()
    setting: str | None = None
    key: str | None = None
    factor_of: str | None = None
    kind: Literal["value", "flag", "list"] = "value"
    is_refused: bool = False


def _flag(instead: str, same: tuple[Any, ...] = ()) -> ForeignKeyword:
    return ForeignKeyword(instead, same, kind="flag")


def _list(instead: str, same: tuple[Any, ...] = ()) -> ForeignKeyword:
    return ForeignKeyword(instead, same, kind="list")


_KINDS = "The model's files decide what it can do: one engine answers generation and pooling requests."
_PLATFORM = "The platform plugin decides this."
_ENCODERS = "Each tensor-parallel rank holds the whole encoder."
_SPECULATIVE = "Pass speculative_config={'method': ..., 'num_speculative_tokens': ...}."
_SERVER = "Give this to the server: `mvllm serve --help`."
_REPLICAS = "Engine cores are processes of this machine; distributed_executor_backend='ray' uses workers on several."
_MACHINE = "Workers are processes of this machine; distributed_executor_backend='ray' uses several."
_TRACING = "Pass --otlp-traces-endpoint to `mvllm serve`."
_LOGGING = "The variable MVLLM_LOGGING_LEVEL sets the level of the log."
_CAPTURE = "The platform decides which steps it captures."
_ONE_BY_ONE = "Long prompts are computed one by one; long_prefill_token_threshold limits their tokens in a step."
_PROCESSORS = "Images and audio are prepared on the host, in processes of their own."

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
    "disable_sliding_window": _flag("Sliding windows are used wherever the model has them."),
    "disable_cascade_attn": _flag("Equal prefixes are shared by the prefix cache alone.", (True,)),
    "logits_processor_pattern": ForeignKeyword("Logits processors are named by the setting logits_processors."),
    "served_model_name": _list(_SERVER),
    "media_io_kwargs": ForeignKeyword(
        "Frames of videos are chosen by num_frames or fps in mm_processor_kwargs.", ({},)
    ),
    "disable_mm_preprocessor_cache": _flag("Set mm_processor_cache_gb to 0 for no cache."),
    "interleave_mm_strings": _flag("Images stand where the parts of a message put them.", (True,)),
    "skip_mm_profiling": _flag("Memory of encoders is counted from the model's shapes.", (True,)),
    "mm_processor_cache_type": ForeignKeyword("Each front end keeps processed items in its own memory.", ("lru",)),
    "mm_shm_cache_max_object_size_mb": ForeignKeyword("Each front end keeps processed items in its own memory."),
    "mm_encoder_only": _flag("The language part is always loaded."),
    "mm_encoder_tp_mode": ForeignKeyword(_ENCODERS, ("data",)),
    "mm_encoder_attn_backend": ForeignKeyword(_PLATFORM),
    "video_pruning_rate": ForeignKeyword("Every sampled frame of a video is used.", (0, 0.0)),
    "enable_multimodal_encoder_data_parallel": _flag(_ENCODERS),
    "io_processor_plugin": ForeignKeyword("Inputs and outputs are texts and token ids."),
    "quantization_config": ForeignKeyword(
        "The checkpoint's config.json describes quantized weights; `quantization` names a method for others."
    ),
    "allow_deprecated_quantization": _flag("No quantization method is deprecated.", (True,)),
    # loading
    "download_dir": ForeignKeyword("Models are stored in the hub's cache; set HF_HUB_CACHE to move it."),
    "model_loader_extra_config": ForeignKeyword("Weights are read as load_format says.", ({},)),
    "ignore_patterns": _list("Only the files that mvllm reads are fetched."),
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
    "calculate_kv_scales": _flag("Scales are computed for each token and head.", (True,)),
    "kv_sharing_fast_prefill": _flag("Every layer computes the whole prompt."),
    "disable_hybrid_kv_cache_manager": _flag("Layers of different windows have KV cache groups of their own."),
    "kv_offloading_backend": ForeignKeyword("Workers copy blocks to host memory.", ("native",)),
    "ec_transfer_config": ForeignKeyword("Engines do not exchange caches."),
    "offload_backend": ForeignKeyword("Weights stay on the device.", ("auto",)),
    "cpu_offload_gb": ForeignKeyword("Weights stay on the device.", (0, 0.0)),
    "cpu_offload_params": _list("Weights stay on the device."),
    "mamba_cache_dtype": ForeignKeyword("States have the model's dtype.", ("auto",)),
    "mamba_ssm_cache_dtype": ForeignKeyword("States have the model's dtype.", ("auto",)),
    "mamba_block_size": ForeignKeyword("Blocks of every layer have the size block_size."),
    "mamba_cache_mode": ForeignKeyword("The prefix cache holds what the model's layers permit.", ("none",)),
    "enable_sleep_mode": _flag("sleep() needs no setting.", (True,)),
    # scheduler
    "scheduler_cls": ForeignKeyword("scheduling_policy is 'fcfs' or 'priority'."),
    "scheduler_delay_factor": ForeignKeyword("Waiting requests are scheduled at once.", (0,)),
    "num_scheduler_steps": ForeignKeyword("Steps overlap instead; see async_scheduling.", (1,)),
    "num_lookahead_slots": ForeignKeyword(_SPECULATIVE, (0,)),
    "multi_step_stream_outputs": _flag("Every step returns its outputs.", (True,)),
    "disable_async_output_proc": _flag("async_scheduling=False plans one step at a time."),
    "disable_chunked_mm_input": _flag("Chunks of a prompt may end within an image."),
    "max_num_scheduled_tokens": ForeignKeyword("max_num_batched_tokens is the limit of a step."),
    "scheduler_reserve_full_isl": _flag("A prompt starts when the whole of it has blocks.", (True,)),
    "prefill_schedule_interval": ForeignKeyword("Prompts are scheduled in every step.", (1,)),
    "watermark": ForeignKeyword("Each running request has a block left when another one starts.", (0, 0.0)),
    "stream_interval": ForeignKeyword("Each step's tokens can be read at once, and unread ones together.", (1,)),
    "performance_mode": ForeignKeyword(
        "docs/how-to/tune.md names the settings for latency and throughput.", ("balanced",)
    ),
    "use_v2_block_manager": _flag("There is one block manager.", (True,)),
    # several devices
    "enable_expert_parallel": _flag(
        "Each expert is split over the ranks of tensor parallelism; each data-parallel replica holds all experts."
    ),
    "enable_eplb": _flag("Experts stay where they were loaded."),
    "eplb_config": ForeignKeyword("Experts stay where they were loaded."),
    "expert_placement_strategy": ForeignKeyword("Experts stay where they were loaded.", ("linear",)),
    "num_redundant_experts": ForeignKeyword("Experts stay where they were loaded.", (0,)),
    "eplb_window_size": ForeignKeyword("Experts stay where they were loaded."),
    "eplb_step_interval": ForeignKeyword("Experts stay where they were loaded."),
    "eplb_log_balancedness": _flag("Experts stay where they were loaded."),
    "enable_elastic_ep": _flag("The number of ranks is that of the start."),
    "all2all_backend": ForeignKeyword(_PLATFORM),
    "moe_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "dcp_kv_cache_interleave_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "cp_kv_cache_interleave_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "dcp_comm_backend": ForeignKeyword("A sequence is not split over ranks."),
    "nnodes": ForeignKeyword(_MACHINE, (1,)),
    "node_rank": ForeignKeyword(_MACHINE, (0,)),
    "master_addr": ForeignKeyword(_MACHINE, ("127.0.0.1",)),
    "master_port": ForeignKeyword(_MACHINE),
    "data_parallel_hybrid_lb": _flag(_REPLICAS),
    "data_parallel_external_lb": _flag(_REPLICAS),
    "numa_bind": _flag(_PLATFORM),
    "decode_context_parallel_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "prefill_context_parallel_size": ForeignKeyword("A sequence is not split over ranks.", (1,)),
    "data_parallel_backend": ForeignKeyword(_REPLICAS, ("mp",)),
    "data_parallel_size_local": ForeignKeyword(_REPLICAS),
    "data_parallel_rank": ForeignKeyword(_REPLICAS),
    "data_parallel_start_rank": ForeignKeyword(_REPLICAS),
    "data_parallel_address": ForeignKeyword(_REPLICAS),
    "data_parallel_rpc_port": ForeignKeyword(_REPLICAS),
    "disable_custom_all_reduce": _flag(_PLATFORM, (True,)),
    "worker_cls": ForeignKeyword("The platform plugin provides the worker.", ("auto",)),
    "worker_use_ray": _flag("distributed_executor_backend names the executor."),
    "enable_dbo": _flag("Batches are not divided."),
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
    "fully_sharded_loras": _flag("Adapters are split as the layers are."),
    "enable_tower_connector_lora": _flag("Adapters apply to the language part of a model."),
    "specialize_active_lora": _flag(_PLATFORM),
    "lora_dtype": ForeignKeyword("Adapters have the model's dtype.", ("auto",)),
    "lora_extra_vocab_size": ForeignKeyword("Adapters do not extend the vocabulary.", (0, 256)),
    "long_lora_scaling_factors": ForeignKeyword("Adapters do not change the context length."),
    "enable_lora_bias": _flag("Adapters with a bias are refused when they are loaded."),
    "qlora_adapter_name_or_path": ForeignKeyword("Pass a LoRARequest."),
    "default_mm_loras": ForeignKeyword("Pass a LoRARequest."),
    # speculative decoding, structured outputs, reasoning
    "speculative_model": ForeignKeyword(_SPECULATIVE),
    "num_speculative_tokens": ForeignKeyword(_SPECULATIVE),
    "ngram_prompt_lookup_max": ForeignKeyword(_SPECULATIVE),
    "ngram_prompt_lookup_min": ForeignKeyword(_SPECULATIVE),
    "guided_decoding_backend": ForeignKeyword("One grammar library serves every request.", ("auto", "xgrammar")),
    "guided_decoding_disable_fallback": _flag("There is no fallback.", (True,)),
    "guided_decoding_disable_any_whitespace": _flag("JSON outputs may have spaces."),
    "guided_decoding_disable_additional_properties": _flag("The JSON schema decides."),
    "structured_outputs_config": ForeignKeyword("One grammar library serves every request.", ({}, {"backend": "auto"})),
    "enable_reasoning": _flag(_SERVER),
    "reasoning_parser": ForeignKeyword(_SERVER, ("",)),
    "reasoning_parser_plugin": ForeignKeyword("Parsers of other packages are entry points.", ("",)),
    "reasoning_config": ForeignKeyword("SamplingParams(thinking_tags=...) names the texts around thoughts."),
    "chat_template": ForeignKeyword("Pass chat_template to LLM.chat, or --chat-template to `mvllm serve`."),
    # statistics and logs
    "enable_log_requests": _flag("Prompts are never logged."),
    "disable_log_requests": _flag("Prompts are never logged.", (True,)),
    "max_log_len": ForeignKeyword("Prompts are never logged."),
    "aggregate_engine_logging": _flag("The load of all replicas is logged together.", (True,)),
    "enable_logging_iteration_details": _flag("Steps are not logged."),
    "kv_cache_metrics": _flag("Metrics have the usage of the KV cache and the hits of the prefix cache."),
    "kv_cache_metrics_sample": ForeignKeyword("Metrics are counted for every request."),
    "enable_mfu_metrics": _flag("Floating-point operations are not counted."),
    "enable_return_routed_experts": _flag("Outputs have no routing of experts."),
    "show_hidden_metrics_for_version": ForeignKeyword("There are no hidden metrics."),
    "otlp_traces_endpoint": ForeignKeyword(_TRACING),
    "collect_detailed_traces": _list(_TRACING),
    "profiler_config": ForeignKeyword("start_profile() writes to the folder $MVLLM_TORCH_PROFILER_DIR."),
    "log_level": ForeignKeyword(_LOGGING, ("INFO", "info")),
    "logging_config": ForeignKeyword(_LOGGING, ({},)),
    "log_config_file": ForeignKeyword(_LOGGING),
    "custom_histogram_buckets": ForeignKeyword("Histograms have the buckets of docs/reference/metrics.md.", ({},)),
    "per_request_spec_decode_metrics": ForeignKeyword("Metrics count accepted drafts of all requests.", ("none",)),
    "*graph_metrics": _flag("Captured steps are not counted."),
    "enable_layerwise_*_tracing": _flag("start_profile() records every layer."),
    "enable_trace_replay": _flag("Requests are not recorded."),
    "jit_monitor_mode": ForeignKeyword(_PLATFORM, ("warn",)),
    "jit_monitor_verbose": _flag(_PLATFORM),
    "fail_on_environ_validation": _flag("Unknown variables MVLLM_... are warnings."),
    # named by other engines after their own parts
    "max_num_queued_reqs": ForeignKeyword(setting="max_queued_requests"),
    "max_num_queued_tokens": ForeignKeyword(setting="max_queued_tokens"),
    "max_num_active_seqs": ForeignKeyword("max_num_seqs is the limit of running requests."),
    "device_memory_utilization": ForeignKeyword(setting="memory_utilization"),
    "spec_method": ForeignKeyword(setting="speculative_config", key="method"),
    "spec_model": ForeignKeyword(setting="speculative_config", key="model"),
    "spec_tokens": ForeignKeyword(setting="speculative_config", key="num_speculative_tokens"),
    "num_*_blocks_override": ForeignKeyword("kv_cache_memory_bytes sets the size of the KV cache."),
    "device_ids": _list("A variable of the platform chooses the devices that processes see."),
    "distributed_timeout_seconds": ForeignKeyword("start_timeout and step_timeout limit the waits for workers."),
    "cpu_distributed_timeout_seconds": ForeignKeyword("start_timeout and step_timeout limit the waits for workers."),
    "numa_bind_nodes": _list(_PLATFORM),
    "numa_bind_cpus": _list(_PLATFORM),
    "ray_workers_use_*": _flag("start_profile() records the steps of workers."),
    "data_parallel_multi_port_external_lb": _flag(_REPLICAS),
    "dp_sync_interval": ForeignKeyword(_REPLICAS),
    "disable_*_for_dp_synchronization": _flag(_REPLICAS),
    "elastic_ep_max_dp_size": ForeignKeyword("The number of ranks is that of the start."),
    "dcp_q_replicate": _flag("A sequence is not split over ranks."),
    "enable_hc_sp": _flag("A sequence is not split over ranks."),
    "enable_batch_sharded_sampling": _flag("Every rank has the logits that it samples from."),
    "enable_ep_weight_filter": _flag("Every worker reads its own part of the weights.", (True,)),
    "enable_*_comm_suspend": _flag("Communicators stay while the engine sleeps."),
    "enable_shm_tensor_arena": _flag("Messages of workers are in shared memory.", (True,)),
    "enable_fault_tolerance": _flag("If a worker fails, the engine ends with an error."),
    "fault_tolerance_config": ForeignKeyword("If a worker fails, the engine ends with an error.", ({},)),
    "watchdog_config": ForeignKeyword("step_timeout limits a step.", ({},)),
    "model_class_overrides": ForeignKeyword("A plugin registers other classes of models.", ({},)),
    "renderer_num_workers": ForeignKeyword("Templates are rendered in processes of their own.", (1,)),
    "diffusion_config": ForeignKeyword("Only models that generate from left to right run."),
    "engram_config": ForeignKeyword("Models with such tables are not supported."),
    "aux_output_config": ForeignKeyword("Outputs are texts, token ids, log-probabilities and pooled vectors.", ({},)),
    "return_sampling_mask": _flag("Outputs have no masks."),
    "watermark_config": ForeignKeyword("Outputs are not watermarked. Leave it out.", is_refused=True),
    "kv_cache_dtype_skip_layers": _list("Every layer's cache has kv_cache_dtype.", ([],)),
    "prefix_cache_retention_interval": ForeignKeyword("Cached blocks stay until their memory is needed.", (0,)),
    "prefix_match_unit": ForeignKeyword("Prefixes are matched by blocks."),
    "swa_bounded_replay": _flag("Tokens beyond a window are not computed again.", (True,)),
    "ec_manager_config": ForeignKeyword("encoder_cache_size sets the size of the encoder cache.", ({},)),
    "sleep_mode_backend": ForeignKeyword(_PLATFORM),
    "sleep_mode_offload_*graph": _flag(_PLATFORM),
    "sleep_preserve_parameter_names": _list("Level 1 keeps all weights, level 2 none.", ([],)),
    "offload_group_size": ForeignKeyword("Weights stay on the device.", (0,)),
    "offload_num_in_group": ForeignKeyword("Weights stay on the device.", (1,)),
    "offload_prefetch_step": ForeignKeyword("Weights stay on the device.", (1,)),
    "offload_params": _list("Weights stay on the device."),
    "safetensors_prefetch_num_threads": ForeignKeyword("Weights are mapped from the files."),
    "safetensors_prefetch_block_size": ForeignKeyword("Weights are mapped from the files."),
    "long_prefill_token_threshold_adaptive": _flag("long_prefill_slowdown adapts long prompts to running requests."),
    "max_long_partial_prefills": ForeignKeyword(_ONE_BY_ONE, (1,), factor_of="long_prefill_token_threshold"),
    "max_num_partial_prefills": ForeignKeyword(_ONE_BY_ONE),
    "*graph_capture_sizes": _list(_CAPTURE),
    "max_*graph_capture_size": ForeignKeyword(_CAPTURE),
    "enable_*_autotune": _flag(_PLATFORM),
    "enable_*mem_allocator": _flag(_PLATFORM),
    "monokernel": _flag(_PLATFORM),
    "ir_op_priority": ForeignKeyword("op_providers names installed sets of kernels.", ({},)),
    "linear_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "mamba_backend": ForeignKeyword("op_providers names installed sets of kernels."),
    "mamba_ssu_algorithm": ForeignKeyword("op_providers names installed sets of kernels."),
    "gdn_prefill_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "kda_prefill_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "kda_decode_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "sparse_indexer_topk_backend": ForeignKeyword("op_providers names installed sets of kernels.", ("auto",)),
    "use_fp64_gumbel": _flag("Random numbers of sampling are 32-bit counters; see docs/decisions/0002."),
    "use_replayssm": _flag("States of rejected drafts are restored from a copy."),
    "replayssm_buffer_len": ForeignKeyword("States of rejected drafts are restored from a copy."),
    "enable_mamba_cache_stochastic_rounding": _flag("States have the model's dtype."),
    "mamba_cache_philox_rounds": ForeignKeyword("States have the model's dtype."),
    "enable_mamba_shared_prefix_checkpoint": _flag("state_snapshot_interval sets how often states are kept."),
    "enable_moe_shared_loras": _flag("Adapters apply to the layers that they name."),
    "enable_mixed_moe_lora_format": _flag("Adapters apply to the layers that they name."),
    "lora_target_modules": _list("Adapters apply to the layers that they name."),
    "max_lora_cls_labels": ForeignKeyword("Adapters do not change classification heads."),
    "mm_device_do_normalize": _flag(_PROCESSORS),
    "mm_processor_device": ForeignKeyword(_PROCESSORS),
    "mm_tensor_ipc": ForeignKeyword(_PROCESSORS),
    "mm_ipc_*_memory_gb": ForeignKeyword(_PROCESSORS),
    "mm_hasher_algorithm": ForeignKeyword("Contents of media are named by SHA-256.", ("sha256",)),
    "mm_encoder_attn_dtype": ForeignKeyword(_PLATFORM),
    "mm_encoder_fp8_scale_path": ForeignKeyword("Encoders compute in the model's dtype."),
    "mm_encoder_fp8_scale_save_path": ForeignKeyword("Encoders compute in the model's dtype."),
    "mm_encoder_fp8_scale_save_margin": ForeignKeyword("Encoders compute in the model's dtype."),
    "video_pruning_method": ForeignKeyword("Every sampled frame of a video is used."),
}
"""Accepted keywords by name, or by a pattern with `*` for a word of one maker's hardware. Their defaults in other
engines are among `same`."""


def find_foreign(name: str, table: Mapping[str, ForeignKeyword] = FOREIGN_KEYWORDS) -> ForeignKeyword | None:
    """The entry of a keyword, by its name or by the pattern that it matches."""
    if name in table:
        return table[name]
    return next((entry for key, entry in table.items() if "*" in key and fnmatchcase(name, key)), None)


def translate(
    given: Mapping[str, Any], table: Mapping[str, ForeignKeyword] = FOREIGN_KEYWORDS, *, prefix: str = ""
) -> dict[str, Any]:
    """Keyword arguments with the foreign ones replaced by settings of mvllm, or dropped with a warning.

    Args:
        prefix: What stands before a name where the user wrote it, such as `--`; dashes then stand for underscores.

    Raises:
        ConfigError: A foreign keyword and the setting that it stands for are both given, with different values; or
            a keyword is refused.
    """
    entries = {name: find_foreign(name, table) for name in given}
    found = {name: value for name, value in given.items() if entries[name] is None}
    for name, value in given.items():
        keyword = entries[name]
        if keyword is None or value is None:
            continue
        if keyword.setting is not None:
            _store(found, name, keyword, value)
            continue
        shown = prefix + (name.replace("_", "-") if prefix else name)
        if keyword.factor_of is not None and found.get(keyword.factor_of):
            found[keyword.factor_of] = _multiply(shown, value, keyword.factor_of, found[keyword.factor_of])
        elif not _is_same(value, keyword.same):
            if keyword.is_refused:
                raise ConfigError(f"{shown} is not supported. {keyword.instead}")
            logger.warning("%s=%.80r has no effect. %s", shown, value, keyword.instead)
    return found


def _multiply(name: str, factor: Any, setting: str, value: Any) -> Any:
    """A setting of which another engine has a factor, such as the number of requests that it applies to."""
    if type(factor) is not int or factor < 1:
        raise ConfigError(f"{name} must be an integer >= 1, not {factor!r}.")
    if factor == 1 or type(value) is not int:
        return value
    logger.warning("%s=%d multiplies %s, which is %d instead of %d.", name, factor, setting, factor * value, value)
    return factor * value


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
