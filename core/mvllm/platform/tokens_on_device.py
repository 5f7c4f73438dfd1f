"""Whether sampled tokens stay on the device between steps: the engine and its workers ask, and get one answer."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.platform.capabilities import Capabilities


def keeps_sampled_tokens_on_device(config: EngineConfig, capabilities: Capabilities) -> bool:
    """Whether a step is launched before the tokens of the step before have been read.

    Without asynchronous scheduling nothing would be gained, without asynchronous copies neither; and in a pipeline the
    tokens go back to the first stage, by way of the host.
    """
    return (
        config.scheduler.async_scheduling is True
        and capabilities.async_copies
        and config.parallel.pipeline_parallel_size == 1
    )
