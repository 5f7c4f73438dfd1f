"""Gemma 4 with images: a tower over images of any size, whose patches are averaged in squares.

Positions are learned vectors for columns and rows, and rotary: the first half of a head turns by the column, the second
by the row. Queries, keys and values are normalised, and each block's result is normalised, too. The projections of some
models limit the range of their inputs and results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.activation import gated_activation
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.encoder_attention import PackedAttention
from mvllm.layers.linear import ColumnParallelLinear, ReplicatedLinear
from mvllm.layers.norm import RMSNorm
from mvllm.layers.patch_embedding import PatchEmbedding
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.axial_rope import AxialAngles, AxialRope, rope_theta

_TOWER = "vision_tower"


class Gemma4(MultiModalCausalLM):
    """`Gemma4ForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model. Audio is
    not supported: its tower is not loaded."""

    encoder_modules = (_TOWER, "embed_vision", "audio_tower", "embed_audio", "vision_embedder", "multi_modal_projector")
    ignored_encoder_names = re.compile(r"^(audio_tower|embed_audio)\.|\.rotary_emb\.")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Gemma4Encoder(ctx, self.config, self.part_config("vision_config"))


class Gemma4Encoder(ItemEncoder):
    """Tower, average over squares of patches, norm and projection.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        size = vision.positive_int("hidden_size", 768)
        patch, self._kernel = vision.positive_int("patch_size", 16), vision.positive_int("pooling_kernel_size", 3)
        self.size, self._dtype = size, ctx.dtype
        self.patches = _Patches(ctx, patch * patch * 3, size)
        positions = vision.positive_int("position_embedding_size", 10_240)
        self.positions = CheckpointTensor(ctx, f"{_TOWER}.patch_embedder.position_embedding_table", 2, positions, size)
        self.layers = nn.ModuleList(
            _Layer(ctx, f"{_TOWER}.encoder.layers.{i}", vision)
            for i in range(vision.positive_int("num_hidden_layers", 16))
        )
        head_size = vision.positive_int("head_dim", 64)
        quarter = head_size // 4
        frequencies = rope_theta(vision, 100.0) ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
        self._rope = AxialRope(ctx, head_size, frequencies.expand(2, -1), in_halves=True)
        self.bias, self.scale = (
            CheckpointTensor(ctx, f"{_TOWER}.{name}", size) if vision.get("standardize", False) else None
            for name in ("std_bias", "std_scale")
        )
        self.norm = _PlainNorm(ctx, size, vision.positive_number("rms_norm_eps", 1e-6))
        projection = "embed_vision.embedding_projection"
        self.projection = ReplicatedLinear(ctx, projection, size, config.hidden_size, bias=False)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        patches, positions, starts = [], [], [0]
        for item in items:
            of_item = item["image_position_ids"].flatten(0, -3)[0].cpu()
            count = int((of_item[:, 0] >= 0).sum())  # padding follows
            positions.append(of_item[:count])
            patches.append(item["pixel_values"].flatten(0, -3)[0, :count])
            starts.append(starts[-1] + count)
        where = torch.cat(positions)
        x = self.patches(2 * (torch.cat(patches) - 0.5))
        columns, rows = where.to(x.device).unbind(-1)
        x = x + (self.positions.weight[0, columns] + self.positions.weight[1, rows])
        angles = self._rope.angles(where.float())
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, starts, angles)
        x = x if residual is None else residual + x
        pooled = [
            self._pool(part, int(each[:, 0].max()) + 1)
            for part, each in zip(x.split([len(each) for each in positions]), positions, strict=True)
        ]
        projected = self.projection(self.norm(torch.cat(pooled)))
        return list(projected.split([len(each) for each in pooled]))

    def _pool(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Averages over squares of patches: [patches, size] to [squares, size]. Computed in float32, because the result
        is large."""
        n = self._kernel
        grid = x.float().unflatten(0, (-1, columns)).unflatten(1, (-1, n)).unflatten(0, (-1, n))
        pooled = grid.mean(dim=(1, 3)).flatten(0, 1).to(x.dtype).float() * self.size**0.5
        if self.bias is not None and self.scale is not None:
            pooled = (pooled - self.bias.weight.float()) * self.scale.weight.float()
        return pooled.to(self._dtype)


class _Patches(PatchEmbedding):
    """The checkpoint stores the embedding of patches as a matrix already."""

    def __init__(self, ctx: BuildContext, elements: int, size: int) -> None:
        super().__init__(ctx, f"{_TOWER}.patch_embedder.input_proj", (elements,), size, bias=False)


class _PlainNorm(nn.Module):
    """An RMS norm without weight."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self._norm, self._eps = ctx.op("rms_norm", hidden_size=size).function, eps
        self._ones = torch.ones(size, dtype=ctx.dtype, device=ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], normalised."""
        return self._norm(x, self._ones, self._eps)


class _Projection(nn.Module):
    """Linear layers over the same input, [in] to [out] each: in one product, or each with limits of its own."""

    def __init__(self, ctx: BuildContext, names: Sequence[str], size: int, outs: Sequence[int], clips: bool) -> None:
        super().__init__()
        self._outs = tuple(outs)
        bands = [(f"{name}.linear", out) for name, out in zip(names, outs, strict=True)]
        groups = [[band] for band in bands] if clips else [bands]
        self.linears = nn.ModuleList(ColumnParallelLinear(ctx, group, size, bias=False) for group in groups)
        limits = ("input_min", "input_max", "output_min", "output_max") if clips else ()
        of_all = [[CheckpointTensor(ctx, f"{name}.{limit}") for limit in limits] for name in names]
        self.limits = nn.ModuleList(nn.ModuleList(each) for each in of_all)
        self._limits = of_all  # the same, typed

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, sum of outs]."""
        return torch.cat(list(self(x)), dim=-1) if self._limits[0] else self.linears[0](x)

    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """[T, in] to [T, out] of each layer."""
        if not self._limits[0]:
            return self.linears[0](x).split(self._outs, dim=-1)
        results = []
        for linear, limits in zip(self.linears, self._limits, strict=True):
            lowest, highest, lowest_result, highest_result = (each.weight for each in limits)
            results.append(linear(x.clamp(lowest, highest)).clamp(lowest_result, highest_result))
        return results


class _Layer(nn.Module):
    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig) -> None:
        super().__init__()
        size, eps = vision.positive_int("hidden_size", 768), vision.positive_number("rms_norm_eps", 1e-6)
        inner = vision.positive_int("intermediate_size", 3072)
        heads = vision.positive_int("num_attention_heads", 12)
        kv_heads = vision.positive_int("num_key_value_heads", heads)
        clips = bool(vision.get("use_clipped_linears", False))
        self._head_size = head_size = vision.positive_int("head_dim", 64)

        def norm(module: str, width: int = size) -> RMSNorm:
            return RMSNorm(ctx, f"{name}.{module}", width, eps)

        self.input_norm, self.attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.mlp_norm, self.mlp_result_norm = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.q_norm, self.k_norm = norm("self_attn.q_norm", head_size), norm("self_attn.k_norm", head_size)
        self.v_norm = _PlainNorm(ctx, head_size, eps)
        names = [f"{name}.self_attn.{each}_proj" for each in "qkv"]
        widths = [count * head_size for count in (heads, kv_heads, kv_heads)]
        self.qkv = _Projection(ctx, names, size, widths, clips)
        self.output = _Projection(ctx, [f"{name}.self_attn.o_proj"], widths[0], [size], clips)
        self.attention = PackedAttention(ctx, heads, head_size, 1.0, num_kv_heads=kv_heads)
        gates = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = _Projection(ctx, gates, size, [inner, inner], clips)
        self.down = _Projection(ctx, [f"{name}.mlp.down_proj"], inner, [size], clips)
        self._act = gated_activation(ctx, vision.get("hidden_activation", "gelu_pytorch_tanh"), inner)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, starts: Sequence[int], angles: AxialAngles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As EncoderLayer.forward."""
        x, residual = self.input_norm.add_norm(x, residual)
        query, key, value = (part.unflatten(-1, (-1, self._head_size)) for part in self.qkv(x))
        query, key = angles.rotate(self.q_norm(query), self.k_norm(key))
        (attended,) = self.output(self.attention(query, key, self.v_norm(value), starts))
        x, residual = self.mlp_norm.add_norm(self.attention_norm(attended), residual)
        (result,) = self.down(self._act(self.gate_up.joined(x)))
        return self.mlp_result_norm(result), residual
