"""Makes the scheduler's planner of encoders."""

from __future__ import annotations

from mvllm.config.encoder_limits import items_of, limits_of
from mvllm.config.engine_config import EngineConfig
from mvllm.scheduler.encoder_planner import EncoderPlanner


def make_encoder_planner(config: EngineConfig) -> EncoderPlanner | None:
    """The planner; None if requests take text only."""
    model, limits = items_of(config), limits_of(config)
    if model is None or limits is None:
        return None
    return EncoderPlanner(
        model,
        limits,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        can_chunk=config.scheduler.enable_chunked_prefill,
    )
