"""Gemma 4 with images and videos: a tower over images and frames of any size, whose patches are averaged in squares.

Positions are learned vectors for columns and rows, and rotary: the first half of a head turns by the column, the second
by the row. Queries, keys and values are normalised, and each block's result is normalised, too. The projections of some
models limit the range of their inputs and results.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.families.gemma4.audio import Gemma4AudioTower
from mvllm.families.gemma4.encoder_layers import ClippedProjection
from mvllm.layers.activation import gated_activation
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.encoder_attention import PackedAttention
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import RMSNorm, UnitRMSNorm
from mvllm.layers.patch_embedding import PatchEmbedding
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.axial_rope import AxialAngles, AxialRope, rope_theta

_TOWER = "vision_tower"
_IMAGE_FEATURES = "pixel_values", "image_position_ids"
_VIDEO_FEATURES = "pixel_values_videos", "video_position_ids"


class Gemma4(MultiModalCausalLM):
    """`Gemma4ForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    encoder_modules = (_TOWER, "embed_vision", "audio_tower", "embed_audio", "vision_embedder", "multi_modal_projector")
    ignored_encoder_names = re.compile(r"\.rotary_emb\.")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        audio = self.part_config("audio_config") if self.config.hf_config.get("audio_config") else None
        return Gemma4Encoder(ctx, self.config, self.part_config("vision_config"), audio)


class Gemma4Encoder(ItemEncoder):
    """Tower, average over squares of patches, norm and projection; and the tower of audio.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision, audio: The objects `vision_config` and `audio_config`; None for a model without audio.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig, audio: HFConfig | None) -> None:
        super().__init__()
        self.audio = None if audio is None else Gemma4AudioTower(ctx, audio, config.hidden_size)
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
        self.norm = UnitRMSNorm(ctx, size, vision.positive_number("rms_norm_eps", 1e-6))
        projection = "embed_vision.embedding_projection"
        self.projection = ReplicatedLinear(ctx, projection, size, config.hidden_size, bias=False)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        if modality == "audio":
            assert self.audio is not None
            return [self.audio(item["input_features"]) for item in items]
        pixels, places = _VIDEO_FEATURES if modality == "video" else _IMAGE_FEATURES
        frames = [
            list(zip(item[pixels].flatten(0, -3), item[places].flatten(0, -3).cpu(), strict=True)) for item in items
        ]
        patches, positions, starts = [], [], [0]
        for of_frame, places_of_frame in itertools.chain.from_iterable(frames):
            count = int((places_of_frame[:, 0] >= 0).sum())  # padding follows
            positions.append(places_of_frame[:count])
            patches.append(of_frame[:count])
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
        lengths = iter(map(len, pooled))
        return list(projected.split([sum(next(lengths) for _ in of_item) for of_item in frames]))

    def ignores(self, name: str) -> bool:
        return self.audio is None and name.removeprefix("model.").startswith(("audio_tower.", "embed_audio."))

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
        self.v_norm = UnitRMSNorm(ctx, head_size, eps)
        names = [f"{name}.self_attn.{each}_proj" for each in "qkv"]
        widths = [count * head_size for count in (heads, kv_heads, kv_heads)]
        self.qkv = ClippedProjection(ctx, names, size, widths, clips)
        self.output = ClippedProjection(ctx, [f"{name}.self_attn.o_proj"], widths[0], [size], clips)
        self.attention = PackedAttention(ctx, heads, head_size, 1.0, num_kv_heads=kv_heads)
        gates = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self.gate_up = ClippedProjection(ctx, gates, size, [inner, inner], clips)
        self.down = ClippedProjection(ctx, [f"{name}.mlp.down_proj"], inner, [size], clips)
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
