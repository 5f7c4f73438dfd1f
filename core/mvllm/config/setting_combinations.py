"""Checks of settings that depend on each other."""

from __future__ import annotations

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
