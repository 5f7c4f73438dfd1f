"""Readers of what Qwen2-Audio, Voxtral and Whisper take beside text. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.vision_families import part_config, token_id


def _qwen2_audio(hf: HFConfig) -> MultiModalModel | None:
    audio = part_config(hf, "audio_config")
    if audio is None:
        return None
    return MultiModalModel(
        placeholders={"audio": token_id(hf, ("audio_token_id", "audio_token_index"), 151_646)},
        embedding_width=hf.positive_int("hidden_size"),
        max_encoded=audio.positive_int("max_source_positions", 1500) // 2,
    )


def _voxtral(hf: HFConfig) -> MultiModalModel | None:
    if part_config(hf, "audio_config") is None:
        return None
    return MultiModalModel(
        placeholders={"audio": token_id(hf, ("audio_token_id",), 24)}, embedding_width=hf.positive_int("hidden_size")
    )


def _whisper(hf: HFConfig) -> MultiModalModel:
    """A row of the encoder's result has keys and values of all decoder layers. Audio has no place in the prompt."""
    return MultiModalModel(
        placeholders={"audio": -1},
        embedding_width=2 * hf.positive_int("decoder_layers") * hf.positive_int("d_model"),
        cross_attention=True,
        max_encoded=hf.positive_int("max_source_positions", 1500),
    )


AUDIO_FAMILIES: Mapping[str, Callable[[HFConfig], MultiModalModel | None]] = {
    "Qwen2AudioForConditionalGeneration": _qwen2_audio,
    "VoxtralForConditionalGeneration": _voxtral,
    "WhisperForConditionalGeneration": _whisper,
}
"""By architecture."""
