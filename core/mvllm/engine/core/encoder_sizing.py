"""The encoder cache of an engine: its limits, and the scheduler's planner of encoders."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.config.multimodal import EncoderLimits, MultiModalModel, encoder_limits
from mvllm.scheduler.encoder_planner import EncoderPlanner


def items_of(config: EngineConfig) -> MultiModalModel | None:
    """What requests may bring beside text, ready embeddings included; None for text alone."""
    if config.multimodal.refusal is not None:
        return None
    if config.model.multimodal is None and config.multimodal.enable_embeds:
        return MultiModalModel(embedding_width=config.model.hidden_size)
    return config.model.multimodal


def limits_of(config: EngineConfig, model: MultiModalModel) -> EncoderLimits:
    """The limits of encoders, resolved."""
    return encoder_limits(
        model,
        config.multimodal,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
    )


def make_encoder_planner(config: EngineConfig) -> EncoderPlanner | None:
    """The planner; None if requests take text only."""
    model = items_of(config)
    if model is None:
        return None
    return EncoderPlanner(
        model,
        limits_of(config, model),
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        can_chunk=config.scheduler.enable_chunked_prefill,
    )
