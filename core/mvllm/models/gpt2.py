"""GPT-2: learned position embeddings, layer norm before each block, an MLP without gate; matrices are [in, out]."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.models.causal_lm import CausalLM, layer_norm_epsilon


class GPT2Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str, layer: int) -> None:
        super().__init__()
        hf, size, num_heads, head_size = config.hf_config, config.hidden_size, config.num_heads, config.head_size
        self.qkv = QKVLinear(
            ctx, (f"{name}.c_attn",), size, num_heads, num_heads, head_size, bias=True, transposed=True
        )
        self.output = RowParallelLinear(ctx, f"{name}.c_proj", size, size, bias=True, transposed=True)
        scale = head_size**-0.5 if hf.get("scale_attn_weights", True) else 1.0
        self.attention = Attention(ctx, self.qkv.heads, head_size, scale)
        # On the query, not in `scale`: layers of one scale share a backend and its metadata.
        self.query_scale = 1.0 / (layer + 1) if hf.get("scale_attn_by_inverse_layer_idx", False) else None

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        if self.query_scale is not None:
            query = query * self.query_scale
        return self.output(self.attention(query, key, value, step))


class GPT2Layer(nn.Module):
    """A decoder layer: attention and MLP, with a norm before each."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        name, hf, size, eps = f"transformer.h.{layer}", config.hf_config, config.hidden_size, layer_norm_epsilon(config)
        self.attention_norm = LayerNorm(ctx, f"{name}.ln_1", size, eps)
        self.attention = GPT2Attention(config, ctx, f"{name}.attn", layer)
        self.mlp_norm = LayerNorm(ctx, f"{name}.ln_2", size, eps)
        self.mlp = MLP(
            ctx,
            f"{name}.mlp.c_fc",
            f"{name}.mlp.c_proj",
            size,
            hf.positive_int("n_inner", 4 * size),
            hf.get("activation_function", "gelu_new"),
            bias=True,
            transposed=True,
        )

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


class GPT2LMHeadModel(CausalLM):
    """`GPT2LMHeadModel` of Hugging Face checkpoints."""

    keeps_layers = True
    ties_embeddings_by_default = True
    layer_names = re.compile(r"transformer\.h\.(\d+)\.")
    first_stage_names = ("transformer.wte.", "transformer.wpe.")
    last_stage_names = ("transformer.ln_f.",)
    ignored_names = re.compile(r"\.attn\.(masked_)?bias$")  # causal masks in old checkpoints

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf, size, stage = config.hf_config, config.hidden_size, self.stage
        num_positions = hf.positive_int("n_positions", hf.positive_int("max_position_embeddings", 1024))
        self.wte = self._build_embedding(ctx, "transformer.wte", size)
        self.wpe = Embedding(ctx, "transformer.wpe", num_positions, size) if stage.is_first else None
        self.layers = nn.ModuleList(GPT2Layer(config, ctx, layer) for layer in self._layer_numbers())
        self.norm = LayerNorm(ctx, "transformer.ln_f", size, layer_norm_epsilon(config)) if stage.is_last else None
        self.lm_head = self._build_head(ctx, "transformer.wte", size, self.wte)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate
        if self.wte is not None and self.wpe is not None:
            x = self.merge_items(self.wte(input_ids), step) + self.wpe(positions)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(x)
            x = layer(x, step)
        return x if self.norm is None else self.norm(x)
