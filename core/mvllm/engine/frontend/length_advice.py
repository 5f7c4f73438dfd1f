"""What error messages advise when sequences are too long for the engine."""

from __future__ import annotations

from mvllm.config.context_length import derive_context_length
from mvllm.config.model import ModelConfig


def has_models_length(config: ModelConfig) -> bool:
    """Whether `max_model_len` is the model's own context length, so that no setting makes sequences longer."""
    length = derive_context_length(config.hf_config)
    return length is not None and config.max_model_len >= length.num_tokens


def longer_sequences(config: ModelConfig) -> str:
    """What to start the engine with, so that sequences may be longer than `max_model_len`."""
    if config.max_model_len_is_auto:  # as long as the KV cache permits
        return "more memory for the KV cache: max_model_len is auto"
    return "a larger max_model_len"
