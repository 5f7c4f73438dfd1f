"""Whisper: one window of audio, which has no place in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mvllm.errors import RequestError
from mvllm.multimodal.contents import AudioContent
from mvllm.multimodal.item_families.interface import Features, ItemFamily


class WhisperItems(ItemFamily):
    """The encoder's result of a window has `max_source_positions` rows, whatever the audio's length."""

    own_arguments = frozenset({"audio_window"})

    def placeholder(self, modality: str) -> str:
        return ""

    def arguments(self, modality: str, counts: Mapping[str, int]) -> dict[str, Any]:
        if sum(counts.values()) > 1:
            raise RequestError(
                "Whisper takes one audio in a prompt. Send a request for each.", parameter="multi_modal_data"
            )
        return {}

    def process_audio(self, audio: AudioContent, settings: dict[str, Any]) -> tuple[Features, str]:
        """One window of the audio: all of it, or that with the number `audio_window`."""
        extractor = self.processor.feature_extractor
        window, size, samples = settings.pop("audio_window", None), extractor.n_samples, audio.samples
        if window is None and len(samples) > size:
            raise RequestError(
                f"The audio has {len(samples) / audio.sampling_rate:.1f} s; a prompt of Whisper takes at most "
                f"{extractor.chunk_length} s. Use /v1/audio/transcriptions for longer audio, or cut it.",
                parameter="multi_modal_data",
            )
        if window is not None and not (type(window) is int and 0 <= window * size < max(1, len(samples))):
            raise RequestError(
                f"audio_window must be the number of a window of {extractor.chunk_length} s of the audio; found "
                f"{window!r:.40}.",
                parameter="mm_processor_kwargs",
            )
        part = samples if window is None else samples[window * size : (window + 1) * size]
        settings = {**settings, "sampling_rate": audio.sampling_rate, "return_tensors": "pt"}
        features = {"input_features": extractor(part, **settings)["input_features"]}
        # For who asks for all windows; the encoder does not read it.
        features["audio_lengths"] = np.array([len(samples), size, audio.sampling_rate], np.int64)
        return features, ""

    def num_encoded(self, modality: str, features: Features, num_placeholders: int) -> int:
        return self.hf_config.positive_int("max_source_positions", 1500)
