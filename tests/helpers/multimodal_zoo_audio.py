"""Tiny random checkpoints of the families that hear, with their processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, Qwen2AudioConfig, Qwen2Config, VoxtralConfig

from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT

MEL_BINS = 8
QWEN2_AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
QWEN2_AUDIO_POSITIONS = 50
"""Positions of the encoder for the longest audio, which has one second."""
VOXTRAL_AUDIO_ID = 24
VOXTRAL_POSITIONS = 1500
VOXTRAL_LENGTH = 30
"""Embeddings of a window of 30 seconds."""


def _qwen2_audio(audio: dict[str, Any] | None = None, **settings: Any) -> Callable[[], Any]:
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    return lambda: Qwen2AudioConfig(
        text_config=Qwen2Config(**TEXT).to_dict(),
        audio_config={
            "model_type": "qwen2_audio_encoder",
            **sizes,
            "num_mel_bins": MEL_BINS,
            "max_source_positions": QWEN2_AUDIO_POSITIONS,
            **(audio or {}),
        },
        audio_token_index=FIRST_SPECIAL_ID,
        **{"tie_word_embeddings": False, **settings},
    )


def _voxtral(audio: dict[str, Any] | None = None, **settings: Any) -> Callable[[], Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return lambda: VoxtralConfig(
        text_config=LlamaConfig(**TEXT, head_dim=16).to_dict(),
        audio_config={
            "model_type": "voxtral_encoder",
            **sizes,
            "intermediate_size": VOXTRAL_POSITIONS * 16 // VOXTRAL_LENGTH,
            "num_mel_bins": MEL_BINS,
            "max_source_positions": VOXTRAL_POSITIONS,
            **(audio or {}),
        },
        audio_token_id=VOXTRAL_AUDIO_ID,
        **{"tie_word_embeddings": False, **settings},
    )


AUDIO_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_audio": _qwen2_audio(),
    "qwen2_audio-small": _qwen2_audio(audio={"encoder_layers": 1, "activation_function": "gelu_new"}),
    "voxtral": _voxtral(),
    "voxtral-wide": _voxtral(audio={"num_attention_heads": 4, "activation_function": "silu"}, projector_hidden_act="silu"),
}
"""Configs by name; the part of the name before `-` is the family."""
