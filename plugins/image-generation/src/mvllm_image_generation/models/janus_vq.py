"""The pixel decoder of Janus: the decoder of its VQ-VAE (LlamaGen's tokenizer)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.extension_api import BuildContext, HFConfig
from mvllm_image_generation.formats import JANUS_MULTIPLIERS, channel_multipliers
from mvllm_image_generation.models.pixel_decoder import GroupNorm, PixelDecoder, ResnetBlock, Upsample, attend


class JanusPixelDecoder(PixelDecoder):
    """Codes to pixels, with the weights of `model.vqmodel`.

    Args:
        ctx: Build context. The decoder computes in float32, whatever its dtype.
        vq: The object `vq_config` of the config.
    """

    def __init__(self, ctx: BuildContext, vq: HFConfig) -> None:
        super().__init__("model.vqmodel")
        size, latent = vq.positive_int("embed_dim", 8), vq.positive_int("latent_channels", 256)
        multipliers = channel_multipliers(vq, JANUS_MULTIPLIERS)
        self.scale = 2 ** (len(multipliers) - 1)
        with torch.device("meta"):
            self.quantize = nn.ModuleDict({"embedding": nn.Embedding(vq.positive_int("num_embeddings", 16384), size)})
            self.post_quant_conv = nn.Conv2d(size, latent, 1)
            self.decoder = _Decoder(vq, multipliers, latent)
        self.allocate(ctx.floats(torch.float32))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = F.normalize(self.quantize["embedding"](codes), dim=-1)
        return self.decoder(self.post_quant_conv(vectors.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


class _Decoder(nn.Module):
    def __init__(self, vq: HFConfig, multipliers: Sequence[int], latent: int) -> None:
        super().__init__()
        base, num_blocks = vq.positive_int("base_channels", 128), vq.positive_int("num_res_blocks", 2) + 1
        channels = base * multipliers[-1]
        self.conv_in = nn.Conv2d(latent, channels, 3, padding=1)
        self.mid = nn.ModuleDict(
            {
                "block_1": ResnetBlock(channels, channels),
                "attn_1": _Attention(channels),
                "block_2": ResnetBlock(channels, channels),
            }
        )
        self.up = nn.ModuleList()
        for level in reversed(range(len(multipliers))):
            inputs = [channels] + [base * multipliers[level]] * (num_blocks - 1)
            channels = base * multipliers[level]
            attends = level == len(multipliers) - 1
            self.up.append(_Level(inputs, channels, attends=attends, upsamples=level > 0))
        self.norm_out = GroupNorm(channels)
        self.conv_out = nn.Conv2d(channels, vq.positive_int("out_channels", 3), 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for block in self.mid.values():
            x = block(x)
        for level in self.up:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class _Level(nn.Module):
    """The blocks of one resolution, and the step to the next one."""

    def __init__(self, inputs: list[int], channels: int, *, attends: bool, upsamples: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(size, channels) for size in inputs)
        self.attn = nn.ModuleList(_Attention(channels) for _ in inputs if attends)
        self.upsample = Upsample(channels) if upsamples else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        return x if self.upsample is None else self.upsample(x)


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same."""
        normed = self.norm(x)
        query, key, value = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.proj_out(attend(query, key, value).transpose(1, 2).unflatten(2, x.shape[2:]))
