"""Settles the configuration with the platform, which says what it wants otherwise and why; core applies and logs it."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.spec import ConfigChange, Refusals

logger = get_logger(__name__)

DEFAULT_MEMORY_UTILIZATION = 0.9
"""Share of the device's memory that the engine takes, where neither the user nor the platform says."""


def settle_config(config: EngineConfig, platform: Platform) -> EngineConfig:
    """The configuration that the engine will run with, on `platform`.

    Raises:
        ConfigError: The platform declines it; every reason and remedy is listed.
    """
    with enter_phase(Phase.FRONTEND):
        answer = platform.plan(config)
    if isinstance(answer, Refusals):
        lines = [f"  {r.field}: {r.reason} Remedy: {r.remedy}" for r in answer.reasons]
        raise ConfigError(f"The platform {platform.spec.name!r} cannot run this configuration:\n" + "\n".join(lines))
    for change in answer.changes:
        config = replace_field(config, change.field, change.value)
        _log(change)
    if config.cache.memory_utilization is None:
        config = replace_field(config, "cache.memory_utilization", DEFAULT_MEMORY_UTILIZATION)
    dtype = _settle_dtype(config, platform)
    return replace_field(config, dtype.field, dtype.value) if dtype else config


def _settle_dtype(config: EngineConfig, platform: Platform) -> ConfigChange | None:
    """What `dtype=auto` becomes, or a check that an explicit dtype can be had."""
    offered = platform.capabilities.dtypes
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
            f"dtype {asked!r} was asked for, but the platform {platform.spec.name!r} computes in {', '.join(offered)}. "
            "Pass one of these, or dtype='auto'."
        )
    return None


def _log(change: ConfigChange) -> None:
    logger.info("%s = %s: %s", change.field, change.value, change.reason)
