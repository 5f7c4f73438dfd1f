"""Whisper: an encoder of audio, and a decoder whose layers attend to its result.

    spectrogram -> encoder -> keys and values of every decoder layer      once for each audio, kept in the encoder cache
    tokens -> [self-attention, cross-attention to them, MLP] x layers -> logits

The encoder cache holds keys and values instead of states, so a step multiplies no matrix by 1,500 states for each layer
and request:

    row of the result      k of layer 0 | v of layer 0 | k of layer 1 | v of layer 1 | ...
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import Embedding
from mvllm.layers.encoder_attention import PackedAttention
from mvllm.layers.linear import ColumnParallelLinear, HeadShard, Linear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.models.audio.whisper_encoder import WhisperEncoder, WhisperEncoderSizes, WhisperQKV
from mvllm.models.causal_lm import CausalLM
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import encoder_context

_EPS = 1e-5


@dataclass(frozen=True)
class CrossInputs:
    """What the cross-attention of a step reads.

    Attributes:
        rows: int64 [n]: the tokens of requests with audio; None for all tokens.
        starts: The first of these tokens of each such request, and the end.
        results: [K, layers, 2, heads on this rank, head_size]: keys and values of these requests behind each other.
        key_starts: Likewise for the rows of `results`.
    """

    rows: torch.Tensor | None
    starts: tuple[int, ...]
    results: torch.Tensor
    key_starts: tuple[int, ...]


class WhisperForConditionalGeneration(CausalLM):
    """`WhisperForConditionalGeneration` of Hugging Face checkpoints. A request without audio has no cross-attention."""

    ties_embeddings_by_default = True
    head_name = "proj_out"
    layer_names = re.compile(r"model\.decoder\.layers\.(\d+)\.(?!encoder_attn\.[kv]_proj\.)")
    first_stage_names = (
        "model.encoder.",
        "model.decoder.embed_tokens.",
        "model.decoder.embed_positions.",
    )
    last_stage_names = ("model.decoder.layer_norm.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf, size, stage, name = config.hf_config, config.hidden_size, self.stage, "model.decoder"
        self.embed_tokens = self._build_embedding(ctx, f"{name}.embed_tokens", size)
        self.embed_positions = (
            Embedding(ctx, f"{name}.embed_positions", hf.positive_int("max_target_positions", 448), size)
            if stage.is_first
            else None
        )
        self.layers = nn.ModuleList(WhisperDecoderLayer(config, ctx, layer) for layer in self._layer_numbers())
        self.norm = LayerNorm(ctx, f"{name}.layer_norm", size, _EPS) if stage.is_last else None
        self.lm_head = self._build_head(ctx, f"{name}.embed_tokens", size, self.embed_tokens)
        self._heads = HeadShard.for_shards(config.num_heads, config.num_heads, ctx.shares)
        if config.multimodal is not None and stage.is_first:
            self.item_encoder = WhisperItemEncoder(encoder_context(ctx), config)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate
        if x is None:
            assert self.embed_tokens is not None and self.embed_positions is not None, "the first stage embeds tokens"
            x = self.embed_tokens(input_ids) + self.embed_positions(positions)  # `scale_embedding` has no effect
        cross = self._cross_inputs(step)
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            x = layer(x, step, cross, number)
        return x if self.norm is None else self.norm(x)

    def ignores(self, name: str) -> bool:
        """Without audio, tensors of the encoder and of the cross-attention's keys and values are ignored."""
        if self.item_encoder is None and re.match(r"model\.encoder\.|.*\.encoder_attn\.[kv]_proj\.", name):
            return True
        return super().ignores(name)

    def _cross_inputs(self, step: ForwardStep) -> CrossInputs | None:
        if step.cross_inputs is None:
            return None
        assert step.query_start_loc is not None, "cross-attention needs the first token of each request"
        bounds = step.query_start_loc.tolist()
        chosen = [i for i, result in enumerate(step.cross_inputs) if result is not None and bounds[i + 1] > bounds[i]]
        found = [result for i in chosen if (result := step.cross_inputs[i]) is not None]
        if not found:
            return None
        lengths = [bounds[i + 1] - bounds[i] for i in chosen]
        rows = None
        if len(chosen) < len(step.cross_inputs):
            tokens = itertools.chain.from_iterable(range(bounds[i], bounds[i + 1]) for i in chosen)
            rows = torch.tensor(list(tokens), device=found[0].device)
        heads = self._heads
        results = (found[0] if len(found) == 1 else torch.cat(found)).unflatten(
            -1, (self.config.num_layers, 2, self.config.num_heads, self.config.head_size)
        )
        return CrossInputs(
            rows,
            (0, *itertools.accumulate(lengths)),
            results[:, :, :, heads.first_head : heads.first_head + heads.num_heads],
            (0, *itertools.accumulate(map(len, found))),
        )


class WhisperDecoderLayer(nn.Module):
    """Self-attention, cross-attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        name, hf, size = f"model.decoder.layers.{layer}", config.hf_config, config.hidden_size
        heads, head_size = config.num_heads, config.head_size
        scale = head_size**-0.5
        self.attention_norm = LayerNorm(ctx, f"{name}.self_attn_layer_norm", size, _EPS)
        self.qkv = WhisperQKV(ctx, f"{name}.self_attn", size, heads)
        self.attention = Attention(ctx, self.qkv.heads, head_size, scale)
        self.output = RowParallelLinear(ctx, f"{name}.self_attn.out_proj", size, size, bias=True)
        self.cross_norm = LayerNorm(ctx, f"{name}.encoder_attn_layer_norm", size, _EPS)
        self.cross_query = ColumnParallelLinear(ctx, [(f"{name}.encoder_attn.q_proj", size)], size, bias=True)
        self.cross_attention = PackedAttention(ctx, self.qkv.heads.num_heads, head_size, scale, cross=True)
        self.cross_output = RowParallelLinear(ctx, f"{name}.encoder_attn.out_proj", size, size, bias=True)
        self.mlp_norm = LayerNorm(ctx, f"{name}.final_layer_norm", size, _EPS)
        self.mlp = MLP(
            ctx,
            f"{name}.fc1",
            f"{name}.fc2",
            size,
            hf.positive_int("decoder_ffn_dim"),
            hf.get("activation_function", "gelu"),
            bias=True,
        )
        self._head_size = head_size

    def forward(self, x: torch.Tensor, step: ForwardStep, cross: CrossInputs | None, layer: int) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(self.attention_norm(x))
        x = x + self.output(self.attention(query, key, value, step))
        if cross is not None:
            x = self._add_cross(x, cross, layer)
        return x + self.mlp(self.mlp_norm(x))

    def _add_cross(self, x: torch.Tensor, cross: CrossInputs, layer: int) -> torch.Tensor:
        of_audio = x if cross.rows is None else x.index_select(0, cross.rows)
        query = self.cross_query(self.cross_norm(of_audio)).unflatten(-1, (-1, self._head_size))
        key, value = cross.results[:, layer, 0], cross.results[:, layer, 1]
        found = self.cross_output(self.cross_attention(query, key, value, cross.starts, cross.key_starts))
        return x + found if cross.rows is None else x.index_add(0, cross.rows, found)


class WhisperItemEncoder(ItemEncoder):
    """The encoder, and the keys and values of all decoder layers over its states, of all heads.

    Args:
        ctx: See `encoder_context`.
        config: Of the model.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        sizes = WhisperEncoderSizes.from_config(config.hf_config)
        self.encoder = WhisperEncoder(ctx, "model.encoder", sizes)
        size = config.hidden_size
        names = [f"model.decoder.layers.{layer}.encoder_attn" for layer in range(config.num_layers)]
        self.keys = nn.ModuleList(ReplicatedLinear(ctx, f"{name}.k_proj", size, size, bias=False) for name in names)
        self.values = nn.ModuleList(ReplicatedLinear(ctx, f"{name}.v_proj", size, size, bias=True) for name in names)
        for module in self.modules():
            if isinstance(module, Linear):
                module.supports_lora = False

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        spectrograms = torch.cat([item["input_features"].flatten(0, -3) for item in items])
        states = self.encoder.norm(self.encoder(spectrograms))
        parts = [each(states) for pair in zip(self.keys, self.values, strict=True) for each in pair]
        return list(torch.cat(parts, dim=-1).split(self.encoder.sizes.num_positions))
