"""Voxtral: the encoder of Whisper over windows of 30 seconds, a projector over groups of states, and Llama.

The states of the padding behind the audio are used as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.models.audio.whisper_encoder import WhisperEncoder, WhisperEncoderSizes
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.projector import TwoLayerProjector


class Voxtral(MultiModalCausalLM):
    """`VoxtralForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    encoder_modules = ("audio_tower", "multi_modal_projector")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return VoxtralEncoder(ctx, self.config, self.part_config("audio_config"))


class VoxtralEncoder(ItemEncoder):
    """Audio of any length.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        audio: The object `audio_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, audio: HFConfig) -> None:
        super().__init__()
        sizes = WhisperEncoderSizes.from_config(audio)
        self._width = sizes.intermediate_size
        self.tower = WhisperEncoder(ctx, "audio_tower", sizes)
        self.projector = TwoLayerProjector.read(ctx, self._width, config, bias=False)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        windows = [item["input_features"].flatten(0, -3) for item in items]
        states = self.tower.norm(self.tower(torch.cat(windows)))
        embeddings = self.projector(states.view(-1, self._width))
        per_window = len(embeddings) // sum(map(len, windows))
        return list(embeddings.split([per_window * len(each) for each in windows]))
