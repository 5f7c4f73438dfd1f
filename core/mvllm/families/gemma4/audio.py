"""The audio tower of Gemma 4: a Conformer (arXiv:2005.08100) with attention to near positions.

    log mel spectrogram [T, 128] ─ two convolutions ─> [T / 4, size] ─ layers ─ projection ─> [T / 4, hidden_size]

A layer is half an MLP, attention, a convolution over earlier positions, and half an MLP. Position i attends to the
positions i - past to i + future. A score is the product of a query with a key, and with a vector for their distance,
limited to +- 50 by a tanh.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.families.gemma4.encoder_layers import ClippedProjection
from mvllm.layers.activation import activation
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import RMSNorm, UnitRMSNorm

_EPS = 1e-6
_LONGEST_PERIOD = 10_000.0
_TOWER = "audio_tower"


class Gemma4AudioTower(nn.Module):
    """Spectrograms to embeddings.

    Args:
        ctx: Build context of a tower.
        audio: The object `audio_config`.
        out_size: The language model's `hidden_size`.

    Raises:
        ModelError: config.json has an unusable value.
    """

    def __init__(self, ctx: BuildContext, audio: HFConfig, out_size: int) -> None:
        super().__init__()
        size, eps = audio.positive_int("hidden_size", 1024), audio.positive_number("rms_norm_eps", _EPS)
        channels = audio.get("subsampling_conv_channels", [128, 32])
        if not isinstance(channels, list) or len(channels) != 2 or not all(type(each) is int for each in channels):
            raise ModelError(
                f"{audio.source}: 'subsampling_conv_channels' should be two numbers, found {channels!r:.80}."
            )
        first, second = channels
        name = f"{_TOWER}.subsample_conv_projection"
        self.convolutions = nn.ModuleList(
            (
                _Convolution(ctx, f"{name}.layer0", 1, first, eps),
                _Convolution(ctx, f"{name}.layer1", first, second, eps),
            )
        )
        self.input = ReplicatedLinear(ctx, f"{name}.input_proj_linear", first // 4 * second, size, bias=False)
        count = audio.positive_int("num_hidden_layers", 12)
        self.layers = nn.ModuleList(_Layer(ctx, f"{_TOWER}.layers.{i}", audio) for i in range(count))
        inner = audio.positive_int("output_proj_dims", 1536)
        self.output = ReplicatedLinear(ctx, f"{_TOWER}.output_proj", size, inner, bias=True)
        self.norm = UnitRMSNorm(ctx, inner, eps)
        self.projection = ReplicatedLinear(ctx, "embed_audio.embedding_projection", inner, out_size, bias=False)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """[T, bins] without padding to [T / 4, out_size], rounded up."""
        x = spectrogram.unsqueeze(0)
        for convolution in self.convolutions:
            x = convolution(x)
        x = self.input(x.permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.projection(self.norm(self.output(x)))


class _Convolution(nn.Module):
    """Halves time and bins."""

    def __init__(self, ctx: BuildContext, name: str, in_channels: int, out_channels: int, eps: float) -> None:
        super().__init__()
        self.kernel = CheckpointTensor(ctx, f"{name}.conv.weight", out_channels, in_channels, 3, 3)
        self.scale = CheckpointTensor(ctx, f"{name}.norm.weight", out_channels)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[channels, time, bins] to the same."""
        x = F.conv2d(x.unsqueeze(0), self.kernel.weight, stride=2, padding=1)[0].permute(1, 2, 0)
        return F.layer_norm(x, x.shape[-1:], self.scale.weight, eps=self._eps).relu().permute(2, 0, 1)


class _Layer(nn.Module):
    def __init__(self, ctx: BuildContext, name: str, audio: HFConfig) -> None:
        super().__init__()
        size = audio.positive_int("hidden_size", 1024)
        self._limit = _largest(ctx, audio)
        self.first, self.second = (_HalfMLP(ctx, f"{name}.feed_forward{i}", audio) for i in (1, 2))
        self.attention = _Attention(ctx, f"{name}.self_attn", audio)
        self.attention_norm, self.attended_norm, self.norm = (
            RMSNorm(ctx, f"{name}.norm_{each}", size, _EPS) for each in ("pre_attn", "post_attn", "out")
        )
        self.convolution = _CausalConvolution(ctx, f"{name}.lconv1d", audio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T, size]."""
        x = self.first(x)
        attended = self.attention(self.attention_norm(self._clamped(x)))
        x = x + self.attended_norm(self._clamped(attended))
        return self.norm(self._clamped(self.second(self.convolution(x))))

    def _clamped(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-self._limit, self._limit)


def _largest(ctx: BuildContext, audio: HFConfig) -> float:
    """Largest value between the parts of a layer."""
    return min(audio.positive_number("gradient_clipping", 1e10), torch.finfo(ctx.dtype).max)


class _HalfMLP(nn.Module):
    """An MLP whose result is added with a weight, by default one half."""

    def __init__(self, ctx: BuildContext, name: str, audio: HFConfig) -> None:
        super().__init__()
        size, clips = audio.positive_int("hidden_size", 1024), bool(audio.get("use_clipped_linears", True))
        self.up = ClippedProjection(ctx, [f"{name}.ffw_layer_1"], size, [4 * size], clips)
        self.down = ClippedProjection(ctx, [f"{name}.ffw_layer_2"], 4 * size, [size], clips)
        self.norm = RMSNorm(ctx, f"{name}.pre_layer_norm", size, _EPS)
        self.result_norm = RMSNorm(ctx, f"{name}.post_layer_norm", size, _EPS)
        self._act = activation(ctx, audio.get("hidden_act", "silu"), 4 * size)
        self._weight, self._limit = audio.positive_number("residual_weight", 0.5), _largest(ctx, audio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T, size]."""
        (inner,) = self.up(self.norm(x.clamp(-self._limit, self._limit)))
        (result,) = self.down(self._act(inner))
        return x + self.result_norm(result.clamp(-self._limit, self._limit)) * self._weight


class _CausalConvolution(nn.Module):
    """A gate, a convolution of each channel over earlier positions, and a projection."""

    def __init__(self, ctx: BuildContext, name: str, audio: HFConfig) -> None:
        super().__init__()
        size, eps = audio.positive_int("hidden_size", 1024), audio.positive_number("rms_norm_eps", _EPS)
        clips, self._width = bool(audio.get("use_clipped_linears", True)), audio.positive_int("conv_kernel_size", 5)
        self.start = ClippedProjection(ctx, [f"{name}.linear_start"], size, [2 * size], clips)
        self.end = ClippedProjection(ctx, [f"{name}.linear_end"], size, [size], clips)
        self.kernel = CheckpointTensor(ctx, f"{name}.depthwise_conv1d.weight", size, 1, self._width)
        self.norm = RMSNorm(ctx, f"{name}.pre_layer_norm", size, eps)
        self.result_norm = RMSNorm(ctx, f"{name}.conv_norm", size, eps)
        self._act, self._limit = activation(ctx, audio.get("hidden_act", "silu"), size), _largest(ctx, audio)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T, size]."""
        (gated,) = self.start(self.norm(x))
        values = F.pad(F.glu(gated, dim=-1).transpose(0, 1), (self._width - 1, 0))
        values = F.conv1d(values.unsqueeze(0), self.kernel.weight, groups=len(values))[0].transpose(0, 1)
        (result,) = self.end(self._act(self.result_norm(values.clamp(-self._limit, self._limit))))
        return x + result


class _Attention(nn.Module):
    """Attention to near positions, in float32."""

    def __init__(self, ctx: BuildContext, name: str, audio: HFConfig) -> None:
        super().__init__()
        size, self._heads = audio.positive_int("hidden_size", 1024), audio.positive_int("num_attention_heads", 8)
        clips = bool(audio.get("use_clipped_linears", True))
        self._head_size = size // self._heads
        self.qkv = ClippedProjection(ctx, [f"{name}.{each}_proj" for each in "qkv"], size, [size] * 3, clips)
        self.output = ClippedProjection(ctx, [f"{name}.post"], size, [size], clips)
        self.distances = ReplicatedLinear(ctx, f"{name}.relative_k_proj", size, size, bias=False)
        self.scales = CheckpointTensor(ctx, f"{name}.per_dim_scale", self._head_size)
        left, right = audio.positive_int("attention_context_left", 13), audio.get("attention_context_right", 0)
        if type(right) is not int or right < 0:
            raise ModelError(f"{audio.source}: 'attention_context_right' should be a number, found {right!r:.40}.")
        self._past, self._future = max(left - 2, 0), max(right - 1, 0)
        chunk = audio.positive_int("attention_chunk_size", 12)
        # transformers numbers the distances of a chunk's keys from half of their count downwards; others have none.
        half = (chunk + left - 1 + right) // 2
        numbers = torch.arange(self._past, -self._future - 1, -1) + half - (left - 1)
        self._has_vector = ((numbers >= 0) & (numbers <= half)).to(ctx.device)
        self._angles = _sinusoids(numbers, size).to(ctx.device, ctx.dtype)
        self._cap = audio.positive_number("attention_logit_cap", 50.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] to [T, size]."""
        query, key, value = (part.float().unflatten(-1, (self._heads, -1)) for part in self.qkv(x))
        query = query * (self._head_size**-0.5 / math.log(2) * F.softplus(self.scales.weight.float()))
        keys, values = self._windows(key * (math.log(1 + math.e) / math.log(2))), self._windows(value)
        vectors = self.distances(self._angles).float().unflatten(-1, (self._heads, -1))
        vectors = vectors * self._has_vector[:, None, None]
        scores = torch.einsum("thd,thdw->thw", query, keys) + torch.einsum("thd,whd->thw", query, vectors)
        scores = (scores / self._cap).tanh() * self._cap
        places = torch.arange(len(x), device=x.device)[:, None] + torch.arange(keys.shape[-1], device=x.device)
        is_inside = (places >= self._past) & (places < self._past + len(x))
        weights = scores.masked_fill(~is_inside[:, None], -math.inf).softmax(dim=-1)
        (result,) = self.output(torch.einsum("thw,thdw->thd", weights, values).flatten(1).to(x.dtype))
        return result

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_size] to [T, heads, head_size, past + 1 + future]: what each position attends to."""
        return F.pad(x, (0, 0, 0, 0, self._past, self._future)).unfold(0, self._past + 1 + self._future, 1)


def _sinusoids(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """[n, size]: sines, then cosines of numbers at frequencies from 1 to 1 / 10,000."""
    count = size // 2
    steps = torch.arange(count) * -(math.log(_LONGEST_PERIOD) / max(count - 1, 1))
    angles = numbers[:, None] * torch.exp(steps)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
