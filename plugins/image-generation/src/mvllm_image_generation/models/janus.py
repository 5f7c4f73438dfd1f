"""Janus and Janus-Pro: Llama with a second vocabulary, the codes of images, with an embedding and a head of its own.

id          0 ............ vocab_size | vocab_size + code
embedding   embed_tokens              | generation_aligner(generation_embeddings)
logits      lm_head                   | generation_head
"""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.extension_api import (
    BuildContext,
    ColumnParallelLinear,
    Embedding,
    HFConfig,
    ModelConfig,
    ReplicatedLinear,
    get_logger,
)
from mvllm.extension_api.model_families import TokenSpace
from mvllm.extension_api.models import LlamaForCausalLM, activation
from mvllm_image_generation.formats import image_space
from mvllm_image_generation.models.image_decoding import DecodesImages
from mvllm_image_generation.models.janus_vq import JanusPixelDecoder
from mvllm_image_generation.models.pixel_decoder import pixel_statistics

logger = get_logger(__name__)

_UNDERSTANDING = re.compile(r"model\.(vision_model|aligner|vqmodel\.encoder|vqmodel\.quant_conv)\.")
"""Tensors that only inputs of pixels need."""


class JanusForConditionalGeneration(DecodesImages, LlamaForCausalLM):
    """`JanusForConditionalGeneration` of Hugging Face checkpoints: text, and codes of images.

    Images as input are not supported: the vision tower is not loaded.
    """

    first_stage_names = ("model.embed_tokens.", "model.generation_embeddings.", "model.generation_aligner.")
    last_stage_names = ("model.norm.", "model.generation_head.", "model.vqmodel.")

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf = config.hf_config
        vq = HFConfig(hf.require("vq_config", dict), f"{hf.source}: 'vq_config'")
        self._space = image_space(config)
        floats = ctx.floats()
        self.image_embeddings = _ImageEmbeddings(floats, vq, config.hidden_size) if self.stage.is_first else None
        self.image_head = _ImageHead(floats, vq, config.hidden_size) if self.stage.is_last else None
        if self.stage.is_last and ctx.tp.is_first:
            self.pixel_decoder = JanusPixelDecoder(ctx, vq)
            self.pixel_decoder.mean, self.pixel_decoder.std = pixel_statistics(config.path)
        self._mentions_skipped = self.stage.is_first and ctx.tp.is_first

    def compute_space_logits(self, hidden: torch.Tensor, space: TokenSpace) -> torch.Tensor:
        assert self.image_head is not None, "only the last pipeline stage computes logits"
        return self.image_head(hidden)

    def model_name(self, name: str) -> str:
        """Names as Llama's: `model.layers.0` for `model.language_model.layers.0`."""
        return name.replace("model.language_model.", "model.", 1)

    def ignores(self, name: str) -> bool:
        if _UNDERSTANDING.match(name):
            if self._mentions_skipped:
                logger.info("The vision tower of the checkpoint is not loaded: images are not supported as input.")
                self._mentions_skipped = False
            return True
        return super().ignores(name) or (self.pixel_decoder is None and name.startswith("model.vqmodel."))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeds both spaces for all tokens, because the choice must not depend on values on the device."""
        assert self.image_embeddings is not None, "only the first pipeline stage embeds tokens"
        codes = input_ids - self._space.first
        is_image = codes >= 0
        text = super()._embed(torch.where(is_image, 0, input_ids))
        return torch.where(is_image.unsqueeze(1), self.image_embeddings(codes.clamp(min=0)), text)


class _ImageEmbeddings(nn.Module):
    """Codes to inputs of the transformer. Every rank holds the whole embedding."""

    def __init__(self, ctx: BuildContext, vq: HFConfig, hidden_size: int) -> None:
        super().__init__()
        size, num_codes = vq.positive_int("embed_dim", 8), vq.positive_int("num_embeddings", 16384)
        self.embeddings = Embedding(ctx, "model.generation_embeddings", num_codes, size)
        names = ["fc1", *(f"hidden_layers.{i}" for i in range(vq.positive_int("num_hidden_layers", 2) - 1))]
        sizes = [size] + [hidden_size] * (len(names) - 1)
        self.aligner = nn.ModuleList(
            ReplicatedLinear(ctx, f"model.generation_aligner.{name}", inputs, hidden_size, bias=True)
            for name, inputs in zip(names, sizes, strict=True)
        )
        self._act = activation(ctx, vq.get("hidden_act", "gelu"), hidden_size)
        _without_lora(self)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """[T], from 0, to [T, hidden_size]."""
        x = self.embeddings(codes)
        for i, layer in enumerate(self.aligner):
            x = layer(x if i == 0 else self._act(x))
        return x


class _ImageHead(nn.Module):
    """Hidden states to logits of the codes. Ranks share the second, larger matrix."""

    def __init__(self, ctx: BuildContext, vq: HFConfig, hidden_size: int) -> None:
        super().__init__()
        size, num_codes = vq.positive_int("projection_dim", 2048), vq.positive_int("num_embeddings", 16384)
        self.projection = ReplicatedLinear(ctx, "model.generation_head.proj_out", hidden_size, size, bias=True)
        bands = [("model.generation_head.vision_head", num_codes)]
        self.head = ColumnParallelLinear(ctx, bands, size, bias=True)
        self._act = activation(ctx, vq.get("hidden_act", "gelu"), size)
        self._tp = ctx.tp
        _without_lora(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, number of codes], the same on every rank."""
        return self._tp.all_gather(self.head(self._act(self.projection(hidden))), dim=-1)


def _without_lora(module: nn.Module) -> None:
    """Adapters are for the transformer."""
    for layer in module.modules():
        if isinstance(layer, ReplicatedLinear | ColumnParallelLinear):
            layer.supports_lora = False
