"""EngineSettings: the declarations of the engine's settings, each with its help, group and permitted values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mvllm.checkpoint_formats.registry import load_format_names
from mvllm.config.kv_transfer import PREEMPTION_MODES, ROLES
from mvllm.config.model_builder import DTYPE_ALIASES, DTYPES
from mvllm.config.model_implementations import model_impl_names
from mvllm.config.model_limits import DEFAULT_NUM_BATCHED_TOKENS
from mvllm.config.multimodal_args import MultiModalArgs
from mvllm.config.option import option

LOGPROBS_MODES = (
    *("raw_logprobs", "raw_logits", "pre_temperature_logprobs", "post_temperature_logprobs"),
    *("processed_logprobs", "processed_logits"),
)
SERVER_MAX_QUEUED_REQUESTS = 1024
"""Default of max_queued_requests in a server, which can refuse requests of untrusted clients."""

SERVER_LONG_PREFILL_SLOWDOWN = 1.5
"""Default of long_prefill_slowdown in a server, whose clients wait for every token."""

_NARROW = (
    "Weights of fewer bits are a quantization: quantization='int8' or quantization='int4' makes them while loading."
)
_DTYPE_HINTS = {
    "fp16": "Did you mean float16?",
    "bf16": "Did you mean bfloat16?",
    "fp32": "Did you mean float32?",
    **dict.fromkeys(("float8", "fp8", "float8_e4m3fn", "int8", "int4", "fp4"), _NARROW),
}

_LARGEST_SEED = 2**63 - 1
_LARGEST_BUDGET = 2**24  # of tokens in one step: buffers of that size are allocated


@dataclass
class EngineSettings(MultiModalArgs):
    """Base class of EngineArgs."""

    model: str = option(
        help="Model folder, GGUF file, name on the Hugging Face hub, or 'demo' for the small model that ships with the "
        "package. ':Q4_K_M' after a folder or hub name chooses one of its GGUF files.",
        group="model",
    )
    tokenizer: str | None = option(
        None, help="Folder, GGUF file or hub name of the tokenizer, if it is not the model's.", group="model"
    )
    skip_tokenizer_init: bool = option(
        False, help="Load no tokenizer: prompts and outputs are token ids only.", group="model"
    )
    trust_remote_code: bool = option(
        False,
        help="Permit running Python code that comes with a tokenizer or with a processor of images, audio and video. "
        "Code of models (auto_map) is never run.",
        group="model",
    )
    model_impl: str = option(
        "auto",
        help="Implementation of the model: 'native' (mvllm's or a plugin's), 'transformers' (its modules with mvllm's "
        "attention and linear layers), or 'auto': native if the architecture has a class.",
        group="model",
        choices=model_impl_names,
    )
    revision: str | None = option(
        None, help="Branch, tag or commit on the hub, for every file of the model.", group="model"
    )
    tokenizer_revision: str | None = option(
        None, help="Branch, tag or commit of the tokenizer, if it is not the model's.", group="model"
    )
    hf_token: str | None = option(
        None, help="Token for the hub; without it, HF_TOKEN or the stored login is used.", group="model", secret=True
    )
    hf_overrides: dict[str, Any] | None = option(  # noqa: RUF009  (gives a field, as dataclasses.field does)
        None, help="Keys of config.json to replace, as a JSON object.", group="model"
    )
    dtype: str = option(
        "auto",
        help="Compute dtype; 'auto' selects the checkpoint's if the platform supports it.",
        group="model",
        choices=("auto", *DTYPES, *DTYPE_ALIASES),
        hints=_DTYPE_HINTS,
    )
    quantization: str | None = option(
        None,
        help="'int8' or 'int4' quantizes an unquantized checkpoint while it is loaded; quantized checkpoints name "
        "their method in config.json.",
        group="model",
    )
    max_model_len: int | Literal["auto"] | None = option(
        None,
        help="Longest sequence in tokens, prompt and output together; by default the model's context length. 'auto' "
        "or -1: the longest up to that length that fits into the KV cache.",
        group="model",
        minimum=1,
    )
    seed: int | None = option(
        None,
        help="Seed of the samples of requests without a seed of their own, and of random weights; by default drawn at "
        "each start and logged (random weights are then the same in every start).",
        group="model",
        minimum=0,
        maximum=_LARGEST_SEED,
    )
    max_logprobs: int = option(
        20, help="Largest number of log-probabilities a request may ask for; -1 for all.", group="model", minimum=-1
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        help="What the logprobs of sampled tokens are: log-probabilities or logits of the model (raw); after "
        "penalties, biases and masks, before temperature (pre_temperature); after temperature, before top_k, "
        "top_p and min_p (post_temperature); or after all of them, as sampled from (processed).",
        group="model",
        choices=LOGPROBS_MODES,
    )
    generation_config: str = option(
        "auto",
        help="Where sampling defaults come from: 'auto' (the model's generation_config.json), 'none', or a folder.",
        group="model",
    )
    pooler_config: dict[str, Any] | None = option(  # noqa: RUF009  (as above)
        None,
        help="Defaults of pooling requests, as a JSON object: pooling_type, normalize, dimensions, use_activation; "
        "by default those of the model's files.",
        group="model",
    )
    speculative_config: dict[str, Any] | None = option(  # noqa: RUF009  (as above)
        None,
        help="Speculative decoding, as a JSON object: method 'mtp' (the checkpoint's own multi-token-prediction "
        "module), 'ngram' (prompt_lookup_max, prompt_lookup_min), 'none', or that of a package, such as 'suffix' and "
        "'eagle3' of mvllm-drafts; or a draft 'model'; with num_speculative_tokens. It does not change outputs. The "
        "default is 'mtp' where the checkpoint has the module and the platform gains, else no drafts.",
        group="model",
    )
    enforce_eager: bool = option(False, help="Never capture graphs or compile.", group="model")
    batch_invariant: bool = option(
        False,
        help="Log-probabilities of a request have the same bits whatever else is in the batch, however its prompt was "
        "cut or found in the prefix cache, preempted or not, with draft tokens or not. Needs a platform with this "
        "capability, and makes steps somewhat slower.",
        group="model",
    )

    memory_utilization: float | None = option(
        None,
        help="Share of the device's memory for weights, activations and KV cache together, or of the memory "
        "that other programs leave if it is the host's; by default the platform's proposal, else 0.9.",
        group="cache",
        minimum=0,
        above=True,
        maximum=1,
        aliases=("gpu_memory_utilization",),
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        help="Bytes for the KV cache of each worker, instead of measuring the free memory.",
        group="cache",
        minimum=1,
    )
    kv_cache_dtype: str = option(
        "auto",
        help="Storage dtype of the KV cache; 'auto' is the compute dtype. 'int8' and 'fp8' halve a cache of 16 bits; "
        "scales for each token and head are computed when tokens are stored.",
        group="cache",
    )
    block_size: int | None = option(
        None,
        help="Tokens per KV cache block; by default the attention backend's preferred size.",
        group="cache",
        minimum=1,
        maximum=1024,
    )
    enable_prefix_caching: bool = option(True, help="Reuse the KV of equal prompt prefixes.", group="cache")
    prefix_caching_seed: int | None = option(
        None,
        help="Seed of block hashes, which makes them equal in every run; random by default.",
        group="cache",
        minimum=0,
        maximum=_LARGEST_SEED,
    )
    kv_events_config: dict[str, Any] | None = option(  # noqa: RUF009  (as above)
        None,
        help="Publication of KV cache events, as a JSON object with enable_kv_cache_events and optionally publisher "
        "('zmq' or 'null'), endpoint, replay_endpoint, buffer_steps, hwm and topic; off by default.",
        group="cache",
    )
    state_snapshot_interval: int = option(
        512,
        help="Of models with sequence states (Mamba-2, gated DeltaNet and others): tokens after which a prompt's state "
        "is kept for other prompts that begin alike; each step of a prompt ends there. 0 for the ends of prompts only.",
        group="cache",
        minimum=0,
    )
    kv_offloading_size: float | None = option(
        None,
        help="GiB of host memory that keep blocks which leave the device, all ranks together; by default none.",
        group="cache",
        minimum=0,
    )
    kv_disk_cache: str | None = option(
        None, help="Folder that keeps blocks: prefixes are found again after a restart.", group="cache"
    )
    kv_disk_cache_size: float | None = option(
        None,
        help="Most GiB in kv_disk_cache, of all models; by default a quarter of the free space.",
        group="cache",
        minimum=0,
        above=True,
    )
    kv_transfer_config: dict[str, Any] | None = option(  # noqa: RUF009  (as above)
        None,
        help="A KV connector, as a JSON object with kv_connector (its name), kv_role ('producer', 'consumer' or "
        "'both') and kv_connector_extra_config.",
        group="cache",
    )
    kv_role: str | None = option(
        None,
        help="Computes prompts for other engines ('producer'), continues prompts of others ('consumer'), or both: the "
        "connector shared_memory in this role, for engines of one machine. See kv_transfer_config for others.",
        group="cache",
        choices=ROLES,
    )
    preemption_mode: str = option(
        "auto",
        help="When blocks run out, 'swap' keeps the keys and values of preempted requests in host memory, 'recompute' "
        "computes them again, 'auto' does what takes less time. Without kv_offloading_size they are computed again.",
        group="cache",
        choices=PREEMPTION_MODES,
    )

    max_num_seqs: int = option(256, help="Most sequences running at once.", group="scheduler", minimum=1, maximum=65536)
    max_num_batched_tokens: int | None = option(
        None,
        help=f"Token budget of one step; by default {DEFAULT_NUM_BATCHED_TOKENS}, more where other settings need it or "
        "the platform's devices can use it.",
        group="scheduler",
        minimum=1,
        maximum=_LARGEST_BUDGET,
    )
    enable_chunked_prefill: bool = option(True, help="Let a prompt be computed over several steps.", group="scheduler")
    long_prefill_token_threshold: int | None = option(
        None,
        help="Most tokens of long prompts, which are computed one after the other, in a step while other requests have "
        "tokens to compute; by default half of max_num_batched_tokens, 0 for no limit. If given, it also holds where "
        "the budget of a step in which requests generate is not used up.",
        group="scheduler",
        minimum=0,
    )
    long_prefill_slowdown: float | None = option(
        None,
        help="A prompt of more than four times max_num_batched_tokens may make steps in which other requests generate "
        f"this many times as long, or 0 for no limit. By default {SERVER_LONG_PREFILL_SLOWDOWN} in a server, and no "
        "limit in a program.",
        group="scheduler",
        minimum=0,
    )
    scheduling_policy: str = option(
        "fcfs",
        help="Order of requests: 'fcfs' (first come, first served) or 'priority'.",
        group="scheduler",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool | None = option(
        None,
        help="Plan step N + 1 while step N runs; by default if the device computes asynchronously.",
        group="scheduler",
    )
    max_queued_requests: int | None = option(
        None,
        help="Most sequences that may wait beyond those that can run at once; more are refused. By default "
        f"{SERVER_MAX_QUEUED_REQUESTS} in a server, and any number in a program that uses AsyncLLM.",
        group="scheduler",
        minimum=0,
    )
    max_queued_tokens: int | None = option(
        None,
        help="In a server: most prompt tokens of all in-flight requests; further requests are refused.",
        group="scheduler",
        minimum=1,
    )

    tensor_parallel_size: int = option(
        1, help="Ranks that share each layer.", group="parallel", minimum=1, maximum=1024
    )
    pipeline_parallel_size: int = option(
        1, help="Pipeline stages, each with a contiguous range of layers.", group="parallel", minimum=1, maximum=1024
    )
    data_parallel_size: int = option(1, help="Engine replicas.", group="parallel", minimum=1, maximum=1024)
    distributed_executor_backend: str | None = option(
        None,
        help="How workers run: 'uni' (one, in the engine's process), 'mp' (a process each, on this machine), "
        "'external_launcher' (torchrun or Slurm has started the ranks), the name of an installed package's "
        "executor, or a dotted path to an executor class; by default 'uni' for one worker, and for several "
        "an installed executor that asks for them, or 'mp'. Errors list the names that can be given.",
        group="parallel",
    )
    start_timeout: float = option(
        1800.0,
        help="Seconds that each phase of start-up (loading the weights is one) may take on a worker process.",
        group="parallel",
        minimum=0,
        above=True,
    )
    step_timeout: float = option(
        300.0,
        help="Seconds after which an unfinished step of worker processes counts as hung.",
        group="parallel",
        minimum=0,
        above=True,
    )
    mq_num_slots: int = option(
        10,
        help="Slots of each message queue to worker processes.",
        group="parallel",
        minimum=2,
        maximum=1024,
    )
    mq_slot_bytes: int = option(
        1 << 20,
        help="Bytes of a slot; a larger message goes over a socket. Less where shared memory is scarce.",
        group="parallel",
        minimum=64 << 10,
        maximum=1 << 30,
    )
    mq_spin_seconds: float = option(
        100e-6,
        help="Longest busy wait for a message before a process sleeps; 0 for none. Decreases when idle.",
        group="parallel",
        minimum=0,
        maximum=0.01,
    )
    engine_core_process: bool | None = option(
        None,
        help="Run scheduler and executor in a process of their own, EngineCore; by default they run in the caller's.",
        group="parallel",
    )
    worker_extension_cls: str | None = option(
        None,
        help="A class whose methods `collective_rpc` can call on every worker, as `module:class` or `module.class`.",
        group="parallel",
    )

    load_format: str = option(
        "auto",
        help="'safetensors' and 'gguf' read the checkpoint in that form, 'auto' in the one that there is (safetensors "
        "if both); 'dummy' fills in small random weights.",
        group="load",
        choices=load_format_names,
    )
    use_tqdm_on_load: bool = option(True, help="Show progress while loading weights.", group="load")

    enable_lora: bool = option(False, help="Enable requests with LoRA adapters.", group="lora")
    max_loras: int = option(
        1,
        help="Most different adapters of running requests; the number of adapter slots on the device.",
        group="lora",
        minimum=1,
        maximum=1024,
    )
    max_lora_rank: int = option(
        16, help="Largest rank of an adapter; determines the size of the slots.", group="lora", minimum=1, maximum=1024
    )
    max_cpu_loras: int | None = option(
        None,
        help="Most adapters in host memory, evicted least recently used first; by default max_loras.",
        group="lora",
        minimum=1,
        maximum=65536,
    )

    platform: str | None = option(
        None, help="Platform plugin to run on; by default the only available one.", group="platform"
    )
    op_providers: str | None = option(
        None,
        help="Installed sets of op providers to use before the platform's own, by name, comma-separated.",
        group="platform",
    )
    stat_loggers: str | None = option(None, help="Installed stat loggers, by name, comma-separated.", group="platform")
    disable_log_stats: bool = option(
        False, help="In a server: do not log the load every ten seconds. Metrics are counted anyway.", group="platform"
    )

    logits_processors: str | None = option(
        None,
        help="Logits processors that requests may use: installed ones by name, or classes as 'module:Class', "
        "comma-separated. In Python also a list of names and classes.",
        group="platform",
    )
