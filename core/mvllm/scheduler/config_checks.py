"""Checks of the scheduler's settings."""

from __future__ import annotations

from mvllm.config.engine_config import SchedulerConfig
from mvllm.errors import ConfigError


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
