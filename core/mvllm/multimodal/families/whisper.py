"""Whisper: one window of audio, which has no place in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent
from mvllm.multimodal.families.interface import Features, ItemFamily


class WhisperItems(ItemFamily):
    """The encoder's result of a window has `max_source_positions` rows, whatever the audio's length."""

    def placeholder(self, modality: str) -> str:
        return ""

    def arguments(self, modality: str, counts: Mapping[str, int]) -> dict[str, Any]:
        if sum(counts.values()) > 1:
            raise RequestError(
                "Whisper takes one audio in a prompt. Send a request for each.", parameter="multi_modal_data"
            )
        return {}

    def process_audio(self, audio: AudioContent, settings: dict[str, Any]) -> tuple[Features, str]:
        extractor = self.processor.feature_extractor
        if len(audio.samples) > extractor.n_samples:
            raise RequestError(
                f"The audio has {len(audio.samples) / audio.sampling_rate:.1f} s; a prompt of Whisper takes at most "
                f"{extractor.chunk_length} s. Use /v1/audio/transcriptions for longer audio, or cut it.",
                parameter="multi_modal_data",
            )
        settings = {**settings, "sampling_rate": audio.sampling_rate, "return_tensors": "pt"}
        return {"input_features": extractor(audio.samples, **settings)["input_features"]}, ""

    def num_encoded(self, modality: str, features: Features, num_placeholders: int) -> int:
        return self.hf_config.positive_int("max_source_positions", 1500)
