"""Voxtral: audio in windows of 30 seconds."""

from __future__ import annotations

from typing import Any

from mvllm.multimodal.contents import AudioContent
from mvllm.multimodal.item_families.interface import Features, ItemFamily


class VoxtralItems(ItemFamily):
    """The processor of transformers takes audio only within a chat, so its parts are called here.

    The tokenizer of mistral_common writes `[BEGIN_AUDIO]` before the placeholders; here that is for the chat template.
    """

    def process_audio(self, audio: AudioContent, settings: dict[str, Any]) -> tuple[Features, str]:
        settings = {"sampling_rate": audio.sampling_rate, **self.processor.audio_kwargs, **settings}
        window = settings.pop("max_source_positions")
        features = self.processor._retrieve_input_features([audio.samples], window, **settings)
        encoder = self.hf_config.require("audio_config", dict)
        rows = features.shape[0] * encoder["max_source_positions"] * encoder["hidden_size"]
        return {"input_features": features}, self.placeholder("audio") * (rows // encoder["intermediate_size"])
