"""OPT: learned position embeddings, layer norms before or after each block, an MLP without gate."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import QKVLinear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.models.causal_lm import CausalLM

_POSITION_OFFSET = 2  # the first two rows of the position table are for padding
_EPS = 1e-5


class OPTAttention(nn.Module):
    """Self-attention."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str) -> None:
        super().__init__()
        bias = bool(config.hf_config.get("enable_bias", True))
        hidden_size, num_heads, head_size = config.hidden_size, config.num_heads, config.head_size
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = QKVLinear(ctx, names, hidden_size, num_heads, num_heads, head_size, bias=bias)
        self.output = RowParallelLinear(ctx, f"{name}.out_proj", hidden_size, hidden_size, bias=bias)
        self.attention = Attention(ctx, self.qkv.heads, head_size, head_size**-0.5)

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        return self.output(self.attention(query, key, value, step))


class OPTLayer(nn.Module):
    """A decoder layer with a norm before each block, or, in some model sizes, after each residual sum."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        name, hf, hidden_size = f"model.decoder.layers.{layer}", config.hf_config, config.hidden_size
        affine = bool(hf.get("layer_norm_elementwise_affine", True))
        self.norm_first = bool(hf.get("do_layer_norm_before", True))
        self.attention_norm = LayerNorm(ctx, f"{name}.self_attn_layer_norm", hidden_size, _EPS, affine=affine)
        self.attention = OPTAttention(config, ctx, f"{name}.self_attn")
        self.mlp_norm = LayerNorm(ctx, f"{name}.final_layer_norm", hidden_size, _EPS, affine=affine)
        self.mlp = MLP(
            ctx,
            f"{name}.fc1",
            f"{name}.fc2",
            hidden_size,
            hf.positive_int("ffn_dim"),
            hf.get("activation_function", "relu"),
            bias=bool(hf.get("enable_bias", True)),
        )

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), step)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, step))
        return self.mlp_norm(x + self.mlp(x))


class OPTForCausalLM(CausalLM):
    """`OPTForCausalLM` of Hugging Face checkpoints."""

    keeps_layers = True
    ties_embeddings_by_default = True
    layer_names = re.compile(r"model\.decoder\.layers\.(\d+)\.")
    first_stage_names = ("model.decoder.embed_tokens.", "model.decoder.embed_positions.", "model.decoder.project_in.")
    last_stage_names = ("model.decoder.final_layer_norm.", "model.decoder.project_out.")

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf, hidden_size, stage = config.hf_config, config.hidden_size, self.stage
        embed_size = hf.positive_int("word_embed_proj_dim", hidden_size)
        projected = embed_size != hidden_size
        has_final_norm = hf.get("do_layer_norm_before", True) and not hf.get("_remove_final_layer_norm", False)
        name = "model.decoder"

        self.embed_tokens = self._build_embedding(ctx, f"{name}.embed_tokens", embed_size)
        self.embed_positions = (
            Embedding(
                ctx,
                f"{name}.embed_positions",
                hf.positive_int("max_position_embeddings", 2048) + _POSITION_OFFSET,
                hidden_size,
            )
            if stage.is_first
            else None
        )
        self.project_in = (
            ReplicatedLinear(ctx, f"{name}.project_in", embed_size, hidden_size, bias=False)
            if projected and stage.is_first
            else None
        )
        self.layers = nn.ModuleList(OPTLayer(config, ctx, layer) for layer in self._layer_numbers())
        self.final_norm = (
            LayerNorm(
                ctx,
                f"{name}.final_layer_norm",
                hidden_size,
                _EPS,
                affine=bool(hf.get("layer_norm_elementwise_affine", True)),
            )
            if has_final_norm and stage.is_last
            else None
        )
        self.project_out = (
            ReplicatedLinear(ctx, f"{name}.project_out", hidden_size, embed_size, bias=False)
            if projected and stage.is_last
            else None
        )
        self.lm_head = self._build_head(ctx, f"{name}.embed_tokens", embed_size, self.embed_tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self._embed(input_ids, positions, step) if intermediate is None else intermediate
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(x)
            x = layer(x, step)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        assert self.embed_tokens is not None and self.embed_positions is not None, "only the first stage embeds tokens"
        x = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        return self.merge_items(x, step) + self.embed_positions(positions + _POSITION_OFFSET)
