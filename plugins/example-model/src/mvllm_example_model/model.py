"""ParallelBlock: a decoder whose attention and MLP read the same normalised input; their outputs are added.

    x ──norm──┬── attention ──┐
    │         └── MLP ────────┤
    └─────────────────────────+──> x

Positions are learned. Built from the engine's layers, so it runs on every platform, over several devices, with paged
attention and with checkpoints that are cut along the ranks, none of which is mentioned below.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.extension_api import (
    MLP,
    Attention,
    BuildContext,
    CausalLM,
    Embedding,
    ForwardStep,
    ModelConfig,
    QKVLinear,
    RMSNorm,
    RowParallelLinear,
)

EPS = 1e-6


class ParallelBlock(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        name, size = f"blocks.{layer}", config.hidden_size
        self.norm = RMSNorm(ctx, f"{name}.norm", size, EPS)
        self.qkv = QKVLinear(
            ctx,
            (f"{name}.query", f"{name}.key", f"{name}.value"),
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            bias=False,
        )
        self.attention = Attention(ctx, self.qkv.heads, config.head_size, config.head_size**-0.5)
        self.output = RowParallelLinear(ctx, f"{name}.output", config.num_heads * config.head_size, size, bias=False)
        inner = config.hf_config.positive_int("intermediate_size")
        self.mlp = MLP(ctx, f"{name}.up", f"{name}.down", size, inner, "gelu", bias=False)

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        normed = self.norm(x)
        query, key, value = self.qkv.split(normed)
        attended: torch.Tensor = self.output(self.attention(query, key, value, step))
        return x + attended + self.mlp(normed)


class ParallelBlockForCausalLM(CausalLM):
    """`ParallelBlockForCausalLM` of config.json."""

    layer_names = re.compile(r"blocks\.(\d+)\.")
    first_stage_names = ("tokens.", "positions.")
    last_stage_names = ("final_norm.",)
    head_name = "head"

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        stage, size = self.stage, config.hidden_size
        num_positions = config.hf_config.positive_int("max_position_embeddings")
        self.tokens = self._build_embedding(ctx, "tokens", size)
        self.positions = Embedding(ctx, "positions", num_positions, size) if stage.is_first else None
        self.blocks = nn.ModuleList(ParallelBlock(config, ctx, layer) for layer in self._layer_numbers())
        self.final_norm = RMSNorm(ctx, "final_norm", size, EPS) if stage.is_last else None
        self.lm_head = self._build_head(ctx, "tokens", size, self.tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(input_ids) + self.positions(positions)
        assert x is not None, "every stage but the first needs the result of the one before"
        for block in self.blocks:
            x = block(x, step)
        return x if self.final_norm is None else self.final_norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "only the last stage makes logits"
        return self.lm_head(hidden)
