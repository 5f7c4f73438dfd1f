"""MiniMax-M2: Mixtral with sigmoid routing, partial rotary embedding, and norms of queries and keys over all heads."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import check_activation

_THETA = 5_000_000.0


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """`MiniMaxM2ForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction modules."""

    module_names = ModuleNames({}, aliases={"mlp": "block_sparse_moe"})  # the name in transformers

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """`rotary_dim` elements of each head are rotated; published configs do not say it as a ratio."""
        hf = config.hf_config
        partial = hf.positive_int("rotary_dim", config.head_size) / config.head_size
        rope = RopeParameters.from_config(hf, config.head_size, theta=_THETA, partial=partial)
        return LlamaOptions(qk_width_norm=True, rope=rope)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name = self.config.hf_config, f"model.layers.{layer}.block_sparse_moe"
        check_activation(hf)
        count, top_k = hf.positive_int("num_local_experts", 256), hf.positive_int("num_experts_per_tok", 8)
        experts = FusedMoE(
            ctx,
            f"{name}.experts",
            self.config.hidden_size,
            hf.positive_int("intermediate_size"),
            num_experts=count,
            top_k=top_k,
            names=("w1", "w3", "w2"),
        )
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            experts,
            Routing(top_k, "sigmoid", normalize=True),
            correction=f"{name}.e_score_correction_bias",
            router_dtype=torch.float32,
        )
