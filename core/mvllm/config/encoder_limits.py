"""How many rows encoders compute in a step, and how many a worker keeps. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.config.engine_config import EngineConfig
from mvllm.config.multimodal import MultiModalModel

LONGEST_ITEM = 16384
"""Most rows of an item for which room is kept, where neither config.json nor the settings give a number."""

_CROSS_ATTENTION_ITEMS = 64
"""Most running requests of a model with cross-attention whose items fit into the encoder cache by default."""


@dataclass(frozen=True)
class EncoderLimits:
    """Rows of encoder results, resolved.

    Attributes:
        step_tokens: Most rows that encoders compute in one step; an item of more rows is computed alone.
        cache_tokens: Rows that a worker keeps. No item may have more.
        item_tokens: Rows of the largest item for which memory is kept.
    """

    step_tokens: int
    cache_tokens: int
    item_tokens: int


def items_of(config: EngineConfig) -> MultiModalModel | None:
    """What requests may bring beside text, ready embeddings included; None for text alone."""
    if config.multimodal.refusal is not None:
        return None
    if config.model.multimodal is None and config.multimodal.enable_embeds:
        return MultiModalModel(embedding_width=config.model.hidden_size)
    return config.model.multimodal


def encoder_limits(config: EngineConfig) -> EncoderLimits | None:
    """The limits of the model's encoder; None if requests take text only."""
    model, settings, max_model_len = items_of(config), config.multimodal, config.model.max_model_len
    if model is None:
        return None
    step = settings.max_encoder_tokens or config.scheduler.max_num_batched_tokens
    item = model.max_encoded or min(LONGEST_ITEM, max_model_len)
    if settings.enable_embeds and not model.cross_attention:
        item = max(item, max_model_len)
    cache = settings.encoder_cache_tokens
    if cache is None:
        cache = max(step, item)
        if model.cross_attention:  # they are kept as long as their requests run
            cache = max(cache, item * min(config.scheduler.max_num_seqs, _CROSS_ATTENTION_ITEMS))
    return EncoderLimits(step, cache, min(item, cache))
