"""What requests of an engine may bring beside text, and the limits of its encoders. Needs no torch."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.config.multimodal import EncoderLimits, MultiModalModel, encoder_limits


def items_of(config: EngineConfig) -> MultiModalModel | None:
    """What requests may bring beside text, ready embeddings included; None for text alone."""
    if config.multimodal.refusal is not None:
        return None
    if config.model.multimodal is None and config.multimodal.enable_embeds:
        return MultiModalModel(embedding_width=config.model.hidden_size)
    return config.model.multimodal


def limits_of(config: EngineConfig) -> EncoderLimits | None:
    """The limits of the model's encoders; None if requests take text only."""
    model = items_of(config)
    if model is None:
        return None
    return encoder_limits(
        model,
        config.multimodal,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
    )
