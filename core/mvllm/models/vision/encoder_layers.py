"""The transformer layers of vision towers, which differ in EncoderOptions.

A tower computes the patches of all images of a step together: [T, hidden_size], where T counts the patches of all
images, and `starts` says where each image begins. Every rank holds the whole tower.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.encoder_attention import PackedAttention
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import MLP, GatedMLP
from mvllm.layers.norm import LayerNorm, Norm, NormMaker
from mvllm.models.vision.axial_rope import AxialAngles


@dataclass(frozen=True)
class LayerNames:
    """Checkpoint modules of a layer, below the layer's own name.

    Attributes:
        query, key, value: Projections of the attention.
        qkv: One module with all three, stacked in this order, which is used instead; None for three modules.
        output: Projection of the attention's result.
        up, down: Layers of an MLP without gate.
        gated_mlp: The module of an MLP with gate, which holds gate_proj, up_proj and down_proj.
        attention_norm, mlp_norm: Norms before the two blocks.
        attention_scale, mlp_scale: Tensors with a factor for each element of a block's result; None without.
        q_norm, k_norm: Norms of queries and keys.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    qkv: str | None = None
    output: str = "self_attn.out_proj"
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    gated_mlp: str = "mlp"
    attention_norm: str = "layer_norm1"
    mlp_norm: str = "layer_norm2"
    attention_scale: str | None = None
    mlp_scale: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"


@dataclass(frozen=True)
class EncoderOptions:
    """The settings in which towers differ.

    Attributes:
        hidden_size, intermediate_size, num_heads: Sizes.
        eps, hidden_act: Of the norms and the MLP.
        head_size: Elements of a head; None for hidden_size / num_heads.
        scale: Factor on query-key products; None for 1 / sqrt(head_size).
        norm: Class of the norms.
        qkv_bias, output_bias, mlp_bias: Which linear layers have biases.
        gated: The MLP has a gate.
        qk_norm: Class of the norms of queries and keys over all heads together; None for no such norms.
        names: Checkpoint names.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    eps: float
    hidden_act: str
    head_size: int | None = None
    scale: float | None = None
    norm: NormMaker = LayerNorm
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    gated: bool = False
    qk_norm: NormMaker | None = None
    names: LayerNames = LayerNames()

    @classmethod
    def read(
        cls,
        vision: HFConfig,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        eps: float,
        act: str,
        **more: Any,
    ) -> EncoderOptions:
        """The options in a `vision_config`.

        Args:
            hidden_size, intermediate_size, num_heads, eps, act: Defaults of the family.
            more: Further options.
        """
        return cls(
            hidden_size=vision.positive_int("hidden_size", hidden_size),
            intermediate_size=vision.positive_int("intermediate_size", intermediate_size),
            num_heads=vision.positive_int("num_attention_heads", num_heads),
            eps=vision.positive_number("layer_norm_eps", eps),
            hidden_act=vision.get("hidden_act", act),
            **more,
        )


class EncoderAttention(nn.Module):
    """Attention in both directions between the patches of an image.

    Args:
        ctx: Build context of a tower, see `MultiModalCausalLM`.
        name: The checkpoint module of the layer.
        options: Of the tower.
    """

    def __init__(self, ctx: BuildContext, name: str, options: EncoderOptions) -> None:
        super().__init__()
        size, heads, names = options.hidden_size, options.num_heads, options.names
        head_size = options.head_size or size // heads
        separate = (f"{name}.{names.query}", f"{name}.{names.key}", f"{name}.{names.value}")
        modules = separate if names.qkv is None else (f"{name}.{names.qkv}",)
        self.qkv = QKVLinear(ctx, modules, size, heads, heads, head_size, bias=options.qkv_bias)
        self.output = RowParallelLinear(
            ctx, f"{name}.{names.output}", heads * head_size, size, bias=options.output_bias
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if options.qk_norm is not None:
            width = heads * head_size
            self.q_norm = options.qk_norm(ctx, f"{name}.{names.q_norm}", width, options.eps)
            self.k_norm = options.qk_norm(ctx, f"{name}.{names.k_norm}", width, options.eps)
        scale = head_size**-0.5 if options.scale is None else options.scale
        self.attention = PackedAttention(ctx, heads, head_size, scale)

    def forward(self, x: torch.Tensor, starts: Sequence[int], angles: AxialAngles | None) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        if self.q_norm is not None and self.k_norm is not None:
            shape = query.shape
            query = self.q_norm(query.flatten(1)).view(shape)
            key = self.k_norm(key.flatten(1)).view(shape)
        if angles is not None:
            query, key = angles.rotate(query, key)
        return self.output(self.attention(query, key, value, starts))


class EncoderLayer(nn.Module):
    """Attention and MLP with norms before them, on a residual stream. Arguments as of EncoderAttention."""

    def __init__(self, ctx: BuildContext, name: str, options: EncoderOptions) -> None:
        super().__init__()
        size, names = options.hidden_size, options.names
        self.attention_norm = options.norm(ctx, f"{name}.{names.attention_norm}", size, options.eps)
        self.attention = EncoderAttention(ctx, name, options)
        self.mlp_norm = options.norm(ctx, f"{name}.{names.mlp_norm}", size, options.eps)
        sizes, act, bias = (size, options.intermediate_size), options.hidden_act, options.mlp_bias
        self.mlp: nn.Module
        if options.gated:
            self.mlp = GatedMLP(ctx, f"{name}.{names.gated_mlp}", *sizes, act, bias=bias)
        else:
            self.mlp = MLP(ctx, f"{name}.{names.up}", f"{name}.{names.down}", *sizes, act, bias=bias)
        self.attention_scale, self.mlp_scale = (
            None if scale is None else CheckpointTensor(ctx, f"{name}.{scale}", size)
            for scale in (names.attention_scale, names.mlp_scale)
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, starts: Sequence[int], angles: AxialAngles | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes both blocks. The sums of the stream belong to the norms behind them, which may do both at once.

        Args:
            x: [T, hidden_size]: what is added to the stream next.
            residual: [T, hidden_size]: the stream; None for `x` alone. The storage of both may be reused.
            starts: As in PackedAttention.
            angles: Of the patches, for towers with rotary positions.

        Returns:
            The MLP's result, and the stream to which it is to be added.
        """
        x, residual = self.attention_norm.add_norm(x, residual)
        x = _scaled(self.attention(x, starts, angles), self.attention_scale)
        x, residual = self.mlp_norm.add_norm(x, residual)
        return _scaled(self.mlp(x), self.mlp_scale), residual


def _scaled(x: torch.Tensor, scale: CheckpointTensor | None) -> torch.Tensor:
    return x if scale is None else x * scale.weight


class EncoderLayers(nn.Module):
    """The layers of a tower.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module that holds the layers.
        options: Of the tower.
        count: Number of layers that are computed, which may be fewer than the checkpoint has.
    """

    def __init__(self, ctx: BuildContext, name: str, options: EncoderOptions, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(ctx, f"{name}.{i}", options) for i in range(count))

    def forward(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        angles: AxialAngles | None = None,
        keep: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Computes all layers.

        Args:
            x: [T, hidden_size]. Its storage may be reused.
            starts: As in PackedAttention.
            angles: Of the patches, for towers with rotary positions.
            keep: Numbers of layers: the inputs of these layers are the result, one after the other in each row; the
                number of layers is the output of the last one. None: that output alone.

        Returns:
            [T, hidden_size * number of kept ones].
        """
        count = len(self.layers)
        wanted = (count,) if keep is None else tuple(keep)
        found = self.states(x, [starts] * count, angles, wanted)
        return found[wanted[0]] if len(wanted) == 1 else torch.cat([found[number] for number in wanted], dim=-1)

    def states(
        self,
        x: torch.Tensor,
        starts: Sequence[Sequence[int]],
        angles: AxialAngles | None,
        keep: Collection[int],
    ) -> dict[int, torch.Tensor]:
        """The kept states by their numbers, [T, hidden_size] each. Arguments as of `forward`.

        Args:
            starts: Those of each layer.
        """
        kept: dict[int, torch.Tensor] = {}
        residual: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            if number in keep:
                kept[number] = x.clone() if residual is None else residual + x
            x, residual = layer(x, residual, starts[number], angles)
        if len(self.layers) in keep:
            kept[len(self.layers)] = x if residual is None else residual + x
        return kept


def equal_starts(count: int, length: int) -> tuple[int, ...]:
    """`starts` of `count` sequences of `length` tokens."""
    return tuple(range(0, count * length + 1, length))
