"""The pixel decoder of Emu3: the decoder of its video VQ-VAE, for images.

An image is a video of one latent frame, which is decoded to four frames, of which the first one is the image. Only that
one is decoded to pixels here: after the convolutions over time, frames do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.extension_api import BuildContext, HFConfig
from mvllm_image_generation.formats import EMU3_MULTIPLIERS, channel_multipliers
from mvllm_image_generation.models.pixel_decoder import (
    NORM_EPS,
    NUM_GROUPS,
    PixelDecoder,
    ResnetBlock,
    Upsample,
    attend,
)

_BATCH_NORM_EPS = 1e-5


class Emu3PixelDecoder(PixelDecoder):
    """Codes to pixels, with the weights of `model.vqmodel`.

    Args:
        ctx: Build context. The decoder computes in float32, whatever its dtype.
        vq: The object `vq_config` of the config.
    """

    def __init__(self, ctx: BuildContext, vq: HFConfig) -> None:
        super().__init__("model.vqmodel")
        size, latent = vq.positive_int("embed_dim", 4), vq.positive_int("latent_channels", 4)
        multipliers = channel_multipliers(vq, EMU3_MULTIPLIERS)
        self.scale = 2 ** (len(multipliers) - 1)
        with torch.device("meta"):
            self.quantize = nn.ModuleDict({"embedding": nn.Embedding(vq.positive_int("codebook_size", 32768), size)})
            self.post_quant_conv = _CausalConv3d(size, latent, (3, 1, 1))
            self.decoder = _Decoder(vq, multipliers, size, latent)
        self.allocate(ctx.floats(torch.float32))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        vectors = self.quantize["embedding"](codes).permute(0, 3, 1, 2).unsqueeze(2)  # [n, channels, frames, h, w]
        return self.decoder(self.post_quant_conv(vectors), vectors).permute(0, 2, 3, 1)


class _Decoder(nn.Module):
    def __init__(self, vq: HFConfig, multipliers: Sequence[int], size: int, latent: int) -> None:
        super().__init__()
        base, num_blocks = vq.positive_int("base_channels", 256), vq.positive_int("num_res_blocks", 2)
        channels = base * multipliers[-1]
        doublings = vq.positive_int("temporal_downsample_factor", 4).bit_length() - 1
        self.time_res_stack = nn.ModuleList(_TemporalBlock(latent) for _ in range(num_blocks))
        self.time_conv = nn.ModuleList(_TemporalUpsample(latent) for _ in range(doublings))
        self.conv_in = nn.Conv2d(latent, channels, 3, padding=1)
        self.middle_block = _MiddleBlock(vq, channels, size)
        levels = []
        for level in reversed(range(len(multipliers))):
            outputs = base * multipliers[level]
            attends = level in vq.get("attn_resolutions", [3])
            inputs = [channels] + [outputs] * num_blocks
            levels.append(_Level(vq, inputs, outputs, size, attends=attends, upsamples=level > 0))
            channels = outputs
        self.up_block = nn.ModuleDict({"up": nn.ModuleList(reversed(levels))})
        self.norm_out = _SpatialNorm(size, channels)
        self.conv_out = nn.Conv2d(channels, vq.positive_int("out_channels", 3), 3, padding=1)

    def forward(self, latents: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Latents and the embeddings of codes, each [n, channels, 1, h, w], to [n, 3, h * scale, w * scale]."""
        both = torch.cat((latents, vectors))
        for block in self.time_res_stack:
            both = block(both)
        for upsample in self.time_conv:
            both = F.silu(upsample(both))
        x, codes = both[:, :, 0].chunk(2)
        x = self.middle_block(self.conv_in(x), codes)
        for level in reversed(list(self.up_block["up"])):  # type: ignore[call-overload]
            x = level(x, codes)
        return self.conv_out(F.silu(self.norm_out(x, codes)))


class _SpatialNorm(nn.Module):
    """Group norm whose factor and offset are computed from the codes' embeddings."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(NUM_GROUPS, channels, eps=NORM_EPS)
        self.conv_y = nn.Conv2d(size, channels, 1)
        self.conv_b = nn.Conv2d(size, channels, 1)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same, with `codes` [n, size, h', w']."""
        codes = F.interpolate(codes, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)


class _Attention(nn.Module):
    def __init__(self, vq: HFConfig) -> None:
        super().__init__()
        size = vq.positive_int("hidden_size", 1024)
        self._num_heads = vq.positive_int("num_attention_heads", 1)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same."""
        rows = x.flatten(2).transpose(1, 2)
        query, key, value = self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        result = self.out_proj(attend(query, key, value, self._num_heads))
        return result.transpose(1, 2).unflatten(2, x.shape[2:])


class _MiddleBlock(nn.Module):
    def __init__(self, vq: HFConfig, channels: int, size: int) -> None:
        super().__init__()
        norm = partial(_SpatialNorm, size)
        self.block_1 = ResnetBlock(channels, channels, norm)
        self.attn_1 = _Attention(vq)
        self.attn_norm = norm(channels)
        self.block_2 = ResnetBlock(channels, channels, norm)

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        x = self.block_1(x, codes)
        x = x + self.attn_1(self.attn_norm(x, codes))
        return self.block_2(x, codes)


class _Level(nn.Module):
    """The blocks of one resolution, and the step to the next one."""

    def __init__(
        self, vq: HFConfig, inputs: list[int], channels: int, size: int, *, attends: bool, upsamples: bool
    ) -> None:
        super().__init__()
        norm = partial(_SpatialNorm, size)
        self.block = nn.ModuleList(ResnetBlock(each, channels, norm) for each in inputs)
        self.attn = nn.ModuleList(_Attention(vq) for _ in inputs if attends)
        self.attn_norms = nn.ModuleList(norm(channels) for _ in inputs if attends)
        self.upsample = Upsample(channels) if upsamples else None

    def forward(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.block):
            x = block(x, codes)
            if self.attn:
                x = x + self.attn[i](self.attn_norms[i](x, codes))
        return x if self.upsample is None else self.upsample(x)


class _CausalConv3d(nn.Module):
    """A convolution over frames, rows and columns that reads this frame and the two before it."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int]) -> None:
        super().__init__()
        height, width = kernel[1] - 1, kernel[2] - 1
        self._padding = (width - width // 2, width // 2, height - height // 2, height // 2, 2, 0)
        self.conv = nn.Conv3d(inputs, outputs, kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, frames, h, w] to [n, outputs, frames, h, w]."""
        return self.conv(F.pad(x, self._padding))


class _BatchNorm(nn.Module):
    """Batch norm with the statistics of the checkpoint."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.running_mean, self.running_var = (
            nn.Parameter(torch.empty(channels), requires_grad=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=_BATCH_NORM_EPS)


class _TemporalBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _BatchNorm(channels), _BatchNorm(channels)
        self.conv1, self.conv2 = (_CausalConv3d(channels, channels, (3, 3, 3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class _TemporalUpsample(nn.Module):
    """Doubles the number of frames."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _CausalConv3d(channels, channels, (3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.repeat_interleave(2, dim=2))
