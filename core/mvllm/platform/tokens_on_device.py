"""Decides whether sampled tokens stay on the device between steps; used by the engine core and by its workers."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.platform.capabilities import Capabilities


def keeps_sampled_tokens_on_device(config: EngineConfig, capabilities: Capabilities) -> bool:
    """Whether a step is launched before the tokens of the previous step have been read.

    This needs asynchronous scheduling and asynchronous copies. With pipeline parallelism tokens return to the first
    stage through the host. With draft tokens the host must know how many were accepted: the positions, slots and
    lengths of the next step depend on it.
    """
    return (
        config.scheduler.async_scheduling is True
        and capabilities.async_copies
        and config.parallel.pipeline_parallel_size == 1
        and config.speculative is None
    )
