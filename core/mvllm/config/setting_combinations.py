"""Checks of settings that depend on each other, as the user gives them and as the scheduler gets them."""

from __future__ import annotations

from mvllm.config.engine_config import SchedulerConfig
from mvllm.config.engine_settings import EngineSettings
from mvllm.errors import ConfigError


def check_combinations(args: EngineSettings) -> None:
    """Checks settings that are permitted alone.

    Raises:
        ConfigError: They contradict each other; names both.
    """
    budget = args.max_num_batched_tokens
    if budget is not None and budget < args.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, but must be at least max_num_seqs ({args.max_num_seqs}): every "
            "running sequence needs one token per step. Raise the one or lower the other."
        )
    if args.long_prefill_slowdown is not None and 0 < args.long_prefill_slowdown <= 1:
        raise ConfigError(
            f"long_prefill_slowdown is {args.long_prefill_slowdown:g}, but must be more than 1, or 0 for no limit: "
            "a step with a part of a prompt takes longer than one without."
        )
    if (args.kv_events_config or {}).get("enable_kv_cache_events"):
        if not args.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config enables events of the prefix cache, but enable_prefix_caching is off. Enable both, "
                "or neither."
            )
        if args.distributed_executor_backend == "external_launcher":
            raise ConfigError(
                "kv_events_config enables events, but with distributed_executor_backend 'external_launcher' each rank "
                "runs the whole engine, and all would publish the same events. Leave it out."
            )
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise ConfigError(
            f"max_cpu_loras is {args.max_cpu_loras}, but must be at least max_loras ({args.max_loras}), since "
            "adapters on the device are kept in host memory too. Raise the one or lower the other."
        )


def check_scheduler_config(config: SchedulerConfig, max_model_len: int) -> None:
    """Checks that the limits do not contradict each other.

    Raises:
        ConfigError: They do. The message names the settings to change.
    """
    if config.policy not in ("fcfs", "priority"):
        raise ConfigError(f"scheduling_policy must be 'fcfs' or 'priority', not {config.policy!r}.")
    if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
        raise ConfigError(
            f"max_num_seqs={config.max_num_seqs} and max_num_batched_tokens={config.max_num_batched_tokens} "
            "must both be at least 1."
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill a step must hold the longest prompt, but max_num_batched_tokens="
            f"{config.max_num_batched_tokens} is less than max_model_len={max_model_len}. "
            "Raise the first, lower the second, or enable chunked prefill."
        )
