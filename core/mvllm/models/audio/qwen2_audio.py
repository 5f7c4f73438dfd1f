"""Qwen2-Audio: the encoder of Whisper, the mean of each two states, one linear layer, and Qwen2."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear
from mvllm.models.audio.whisper_encoder import WhisperEncoder, WhisperEncoderSizes
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM


class Qwen2Audio(MultiModalCausalLM):
    """`Qwen2AudioForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    encoder_modules = ("audio_tower", "multi_modal_projector")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Qwen2AudioEncoder(ctx, self.config, self.part_config("audio_config"))


class Qwen2AudioEncoder(ItemEncoder):
    """Audio of up to 30 seconds. The padding behind it has no states.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        audio: The object `audio_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, audio: HFConfig) -> None:
        super().__init__()
        sizes = WhisperEncoderSizes.from_config(audio)
        self.tower = WhisperEncoder(ctx, "audio_tower", sizes)
        self.projector = ReplicatedLinear(
            ctx, "multi_modal_projector.linear", sizes.hidden_size, config.hidden_size, bias=True
        )

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        spectrograms = torch.cat([item["input_features"] for item in items])
        frames = torch.stack([item["feature_attention_mask"].sum() for item in items]).tolist()
        lengths = [(int(count) - 1) // 2 + 1 for count in frames]
        parts = self.tower(spectrograms, lengths).split(lengths)
        pooled = [part[: len(part) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for part in parts]
        embeddings = self.projector(self.tower.norm(torch.cat(pooled)))
        return list(embeddings.split([len(each) for each in pooled]))
