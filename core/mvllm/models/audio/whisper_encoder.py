"""The encoder of Whisper, which Qwen2-Audio and Voxtral use as well.

log-mel spectrogram   [bins, 2 T]
two convolutions      [T, size]       the second takes every other frame
+ positions           [T, size]
layers                [T, size]       attention in both directions
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.encoder_attention import PackedAttention
from mvllm.layers.linear import QKVLinear, ReplicatedLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.layers.patch_embedding import PatchEmbedding
from mvllm.layers.weight_target import WeightTarget

FRAMES_PER_POSITION = 2
"""Frames of the spectrogram for one position of the encoder."""
_WIDTH = 3
_EPS = 1e-5


@dataclass(frozen=True)
class WhisperEncoderSizes:
    """Sizes of an encoder.

    Attributes:
        num_mel_bins: Rows of the spectrogram.
        hidden_size, intermediate_size: Sizes of a layer and of its MLP.
        num_layers, num_heads: Their numbers.
        num_positions: Positions of the result: half the frames of a spectrogram.
        hidden_act: Activation of the MLPs.
    """

    num_mel_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    hidden_act: str

    @classmethod
    def from_config(cls, hf: HFConfig) -> WhisperEncoderSizes:
        """The sizes in `audio_config`, or in the config of Whisper.

        Raises:
            ModelError: One is missing or is not a positive integer, or the heads do not divide the hidden size.
        """

        def size(whisper: str, voxtral: str) -> int:
            return hf.positive_int(voxtral if voxtral in hf and whisper not in hf else whisper)

        hidden_size = size("d_model", "hidden_size")
        num_heads = size("encoder_attention_heads", "num_attention_heads")
        if hidden_size % num_heads:
            raise ModelError(
                f"{hf.source}: the audio encoder's size {hidden_size} is not a multiple of its {num_heads} heads."
            )
        return cls(
            num_mel_bins=hf.positive_int("num_mel_bins"),
            hidden_size=hidden_size,
            intermediate_size=size("encoder_ffn_dim", "intermediate_size"),
            num_layers=size("encoder_layers", "num_hidden_layers"),
            num_heads=num_heads,
            num_positions=hf.positive_int("max_source_positions", 1500),
            hidden_act=hf.get("activation_function", "gelu"),
        )


class Conv1dGelu(nn.Module):
    """A convolution of width 3 over time, followed by GELU.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        in_channels, out_channels: Channels.
        stride: Distance of two results, in inputs.
    """

    def __init__(self, ctx: BuildContext, name: str, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self._stride = stride
        self.windows = PatchEmbedding(ctx, name, (in_channels, _WIDTH), out_channels, bias=True)
        self._act = activation(ctx, "gelu", out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in_channels, T] to [n, T / stride, out_channels]."""
        windows = F.pad(x, (1, 1)).unfold(-1, _WIDTH, self._stride).transpose(1, 2)
        results = self._act(self.windows(windows.flatten(2).flatten(0, 1)))
        return results.unflatten(0, (x.shape[0], -1))


class WhisperQKV(QKVLinear):
    """Query, key and value projections in one product. The keys have no bias."""

    def __init__(self, ctx: BuildContext, name: str, size: int, num_heads: int) -> None:
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        super().__init__(ctx, names, size, num_heads, num_heads, size // num_heads, bias=True)
        self._without_bias = f"{names[1]}.bias"

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Loading fills the bias of the keys with zeros, because no tensor does."""
        for name, target in super().weight_targets():
            if name != self._without_bias:
                yield name, target


class WhisperEncoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, ctx: BuildContext, name: str, sizes: WhisperEncoderSizes) -> None:
        super().__init__()
        size, inner = sizes.hidden_size, sizes.intermediate_size
        head_size = size // sizes.num_heads
        self.attention_norm = LayerNorm(ctx, f"{name}.self_attn_layer_norm", size, _EPS)
        self.qkv = WhisperQKV(ctx, f"{name}.self_attn", size, sizes.num_heads)
        self.attention = PackedAttention(ctx, sizes.num_heads, head_size, head_size**-0.5)
        self.output = ReplicatedLinear(ctx, f"{name}.self_attn.out_proj", size, size, bias=True)
        self.mlp_norm = LayerNorm(ctx, f"{name}.final_layer_norm", size, _EPS)
        self.mlp = MLP(ctx, f"{name}.fc1", f"{name}.fc2", size, inner, sizes.hidden_act, bias=True)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes both blocks; sequence i has the positions starts[i] to starts[i + 1].

        Args:
            x: [T, size]: what is added to the stream next.
            residual: [T, size]: the stream; None for `x` alone. The storage of both may be reused.

        Returns:
            Likewise for the next layer.
        """
        x, residual = self.attention_norm.add_norm(x, residual)
        query, key, value = self.qkv.split(x)
        x, residual = self.mlp_norm.add_norm(self.output(self.attention(query, key, value, starts)), residual)
        x = self.mlp(x)
        if x.dtype == torch.float16:  # as in transformers, against infinity
            largest = torch.finfo(x.dtype).max - 1000
            return (residual + x).clamp(-largest, largest), None
        return x, residual


class WhisperEncoder(nn.Module):
    """Spectrograms to states.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        sizes: Sizes.
    """

    def __init__(self, ctx: BuildContext, name: str, sizes: WhisperEncoderSizes) -> None:
        super().__init__()
        size, self.sizes = sizes.hidden_size, sizes
        self.conv1 = Conv1dGelu(ctx, f"{name}.conv1", sizes.num_mel_bins, size, 1)
        self.conv2 = Conv1dGelu(ctx, f"{name}.conv2", size, size, FRAMES_PER_POSITION)
        self.positions = Embedding(ctx, f"{name}.embed_positions", sizes.num_positions, size)
        self.layers = nn.ModuleList(
            WhisperEncoderLayer(ctx, f"{name}.layers.{i}", sizes) for i in range(sizes.num_layers)
        )
        self.norm = LayerNorm(ctx, f"{name}.layer_norm", size, _EPS)

    def forward(self, spectrograms: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """The states before the last norm, `self.norm`.

        Args:
            spectrograms: [n, num_mel_bins, 2 * num_positions], compute dtype.
            lengths: Positions of each to compute, from the first; attention does not see the others. None for all.

        Returns:
            [sum of lengths, hidden_size], packed.
        """
        x = self.conv2(self.conv1(spectrograms).transpose(1, 2)) + self.positions.weight
        count, num_positions = x.shape[:2]
        lengths = [num_positions] * count if lengths is None else lengths
        starts = (0, *itertools.accumulate(lengths))
        if starts[-1] == count * num_positions:
            x = x.flatten(0, 1)
        else:
            x = torch.cat([each[:length] for each, length in zip(x, lengths, strict=True)])
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, starts)
        return x if residual is None else residual + x
