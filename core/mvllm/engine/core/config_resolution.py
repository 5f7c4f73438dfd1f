"""Resolves the configuration: asks the platform for its plan, applies and logs the changes, and fills in defaults."""

from __future__ import annotations

import dataclasses

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.engine.core.capability_checks import required_config_changes
from mvllm.errors import ConfigError, PlatformError
from mvllm.executor.interface import log_drawn_seed
from mvllm.logging import get_logger
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.spec import ConfigChange, Plan, Refusal, Refusals

logger = get_logger(__name__)

DEFAULT_MEMORY_UTILIZATION = 0.9
"""Share of the device's memory for the engine, unless the user or the platform sets it."""


def resolve_config(config: EngineConfig, platform: Platform) -> EngineConfig:
    """The configuration that the engine will run with, on `platform`.

    Raises:
        ConfigError: The platform refuses it (the error lists every reason and remedy), does not claim a needed
            capability, or changes a setting to an impossible value.
        PlatformError: The platform fails, or its answer violates the contract.
    """
    with enter_phase(Phase.FRONTEND):
        answer: Plan | Refusals = call_checked(platform, "plan", config, returns=(Plan, Refusals))
    _check_plan_items(platform, answer)
    if isinstance(answer, Refusals):
        lines = [f"  {r.field}: {r.reason} Remedy: {r.remedy}" for r in answer.reasons]
        raise ConfigError(f"The platform {platform.spec.name!r} cannot run this configuration:\n" + "\n".join(lines))
    for change in answer.changes:
        try:
            config = replace_field(config, change.field, change.value)
        except ConfigError as e:
            raise ConfigError(f"The platform {platform.spec.name!r} asks for an impossible change: {e}") from e
        _log(change)
    if config.cache.memory_utilization is None:
        config = replace_field(config, "cache.memory_utilization", DEFAULT_MEMORY_UTILIZATION)
    capabilities: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    dtype = _resolve_dtype(config, capabilities, platform.spec.name)
    config = replace_field(config, dtype.field, dtype.value) if dtype else config
    if config.speculative is not None and config.speculative.model is not None:
        draft = dataclasses.replace(config.speculative.model, dtype=config.model.dtype)
        config = replace_field(config, "speculative.model", draft)
    if config.scheduler.async_scheduling is None:
        # Scheduling ahead pays where the device computes in parallel to the host; on the host both share the cores.
        # With draft tokens, the next step depends on how many of them are accepted.
        ahead = capabilities.async_copies and config.speculative is None
        config = replace_field(config, "scheduler.async_scheduling", ahead)
    for change in required_config_changes(config, capabilities, platform.spec.name):
        config = replace_field(config, change.field, change.value)
        _log(change)
    if config.model.seed_is_drawn and config.parallel.distributed_executor_backend != "external_launcher":
        log_drawn_seed(config.model.seed)  # ranks of an external launcher log it when they have agreed on one
    return config


def _check_plan_items(platform: Platform, answer: Plan | Refusals) -> None:
    parts: object = answer.changes if isinstance(answer, Plan) else answer.reasons
    kind = ConfigChange if isinstance(answer, Plan) else Refusal
    if not isinstance(parts, list | tuple) or not all(isinstance(part, kind) for part in parts):
        raise PlatformError(
            f"The platform {platform.spec.name!r} answered plan with a {type(answer).__name__} that holds something "
            f"else than {kind.__name__}s: {parts!r}."
        )


def _resolve_dtype(config: EngineConfig, capabilities: Capabilities, platform: str) -> ConfigChange | None:
    """The change for `dtype=auto`; None for an explicit dtype, which must be among the platform's."""
    offered = capabilities.dtypes
    if not offered:
        raise PlatformError(f"The platform {platform!r} claims no compute dtype: its Capabilities.dtypes is empty.")
    asked = config.model.dtype
    if asked == "auto":
        stored = config.model.checkpoint_dtype
        if stored in offered:
            return ConfigChange("model.dtype", stored, "the checkpoint's own")
        change = ConfigChange("model.dtype", offered[0], f"the checkpoint's {stored} is not offered by the platform")
        _log(change)
        return change
    if asked not in offered:
        raise ConfigError(
            f"dtype {asked!r} was asked for, but the platform {platform!r} computes in {', '.join(offered)}. "
            "Pass one of these, or dtype='auto'."
        )
    return None


def _log(change: ConfigChange) -> None:
    logger.info("%s = %s: %s", change.field, change.value, change.reason)
