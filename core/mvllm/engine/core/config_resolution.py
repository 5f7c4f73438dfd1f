"""Resolves the engine configuration: applies the changes in the platform's plan, logs them and fills in defaults."""

from __future__ import annotations

import dataclasses

from mvllm.config.engine_config import EngineConfig, ParallelConfig, replace_field
from mvllm.engine.core.capability_checks import required_config_changes
from mvllm.engine.core.default_drafts import settle_default_drafts
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
"""Fraction of the device memory that the engine uses, unless the user or the platform sets it."""


def resolve_config(config: EngineConfig, platform: Platform) -> EngineConfig:
    """The configuration that the engine will run with, on `platform`.

    Raises:
        ConfigError: The platform rejects it (the error lists every reason and remedy), lacks a required
            capability, or changes a setting to an invalid value.
        PlatformError: The platform raises, or its return value violates the contract.
    """
    capabilities: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    config = settle_default_drafts(config, capabilities, platform.spec.name)
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
            raise ConfigError(f"The platform {platform.spec.name!r} changes a setting to an invalid value: {e}") from e
        _log(change)
    if config.cache.memory_utilization is None:
        config = replace_field(config, "cache.memory_utilization", DEFAULT_MEMORY_UTILIZATION)
    dtype = _resolve_dtype(config, capabilities, platform.spec.name)
    config = replace_field(config, dtype.field, dtype.value) if dtype else config
    if config.speculative is not None and config.speculative.model is not None:
        draft = dataclasses.replace(config.speculative.model, dtype=config.model.dtype)
        config = replace_field(config, "speculative.model", draft)
    if config.scheduler.async_scheduling is None:
        # Async scheduling is faster if the device computes in parallel to the host. On a CPU both share the cores.
        # With draft tokens a worker reads its tokens within each step: in this process that blocks, and the output of
        # one step would wait for the next step.
        reads_here = config.speculative is not None and _runs_in_this_process(config.parallel)
        async_scheduling = capabilities.async_copies and not reads_here
        config = replace_field(config, "scheduler.async_scheduling", async_scheduling)
        if capabilities.async_copies and not async_scheduling:
            reason = "with draft tokens it overlaps steps only with workers in processes of their own"
            _log(ConfigChange("scheduler.async_scheduling", False, reason))
    for change in required_config_changes(config, capabilities, platform.spec.name):
        config = replace_field(config, change.field, change.value)
        _log(change)
    if config.kv_transfer.offloading_bytes and capabilities.unified_memory:
        logger.info(
            "kv_offloading_size: the devices of the platform %r use the host's memory, so a larger KV cache "
            "(kv_cache_memory_bytes or memory_utilization) keeps the same blocks without copies. kv_disk_cache is "
            "useful there.",
            platform.spec.name,
        )
    if config.model.seed_is_random and config.parallel.distributed_executor_backend != "external_launcher":
        log_drawn_seed(config.model.seed)  # ranks of an external launcher log it when they have agreed on one
    return config


def _runs_in_this_process(parallel: ParallelConfig) -> bool:
    """Whether a worker runs in the process of the engine core."""
    backend = parallel.distributed_executor_backend
    return backend in ("uni", "external_launcher") or (backend is None and parallel.world_size == 1)


def _check_plan_items(platform: Platform, answer: Plan | Refusals) -> None:
    parts: object = answer.changes if isinstance(answer, Plan) else answer.reasons
    kind = ConfigChange if isinstance(answer, Plan) else Refusal
    if not isinstance(parts, list | tuple) or not all(isinstance(part, kind) for part in parts):
        raise PlatformError(
            f"The platform {platform.spec.name!r} returned a {type(answer).__name__} from plan with items "
            f"that are not {kind.__name__} objects: {parts!r}. All items must be {kind.__name__}."
        )


def _resolve_dtype(config: EngineConfig, capabilities: Capabilities, platform: str) -> ConfigChange | None:
    """The change for `dtype=auto`; None for an explicit dtype, which must be in `Capabilities.dtypes`."""
    supported = capabilities.dtypes
    if not supported:
        raise PlatformError(f"The platform {platform!r} claims no compute dtype: its Capabilities.dtypes is empty.")
    requested = config.model.dtype
    if requested == "auto":
        stored = config.model.checkpoint_dtype
        if stored in supported:
            return ConfigChange("model.dtype", stored, "the checkpoint's own")
        change = ConfigChange("model.dtype", supported[0], f"the checkpoint's {stored} is not offered by the platform")
        _log(change)
        return change
    if requested not in supported:
        raise ConfigError(
            f"dtype {requested!r} was asked for, but the platform {platform!r} computes in {', '.join(supported)}. "
            "Pass one of these, or dtype='auto'."
        )
    return None


def _log(change: ConfigChange) -> None:
    logger.info("%s = %s: %s", change.field, change.value, change.reason)
