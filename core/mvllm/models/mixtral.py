"""Mixtral: Mistral with experts instead of the MLP."""

from __future__ import annotations

from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LlamaOptions
from mvllm.models.mistral import MistralForCausalLM
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import check_activation


class MixtralForCausalLM(MistralForCausalLM):
    """`MixtralForCausalLM` of Hugging Face checkpoints."""

    module_names = ModuleNames({}, aliases={"mlp": "block_sparse_moe"})  # the name in transformers

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.block_sparse_moe", self.config.hidden_size
        check_activation(hf)
        num_experts, top_k = hf.positive_int("num_local_experts", 8), hf.positive_int("num_experts_per_tok", 2)
        experts = FusedMoE(
            ctx,
            f"{name}.experts",
            hidden_size,
            hf.positive_int("intermediate_size"),
            num_experts=num_experts,
            top_k=top_k,
            names=("w1", "w3", "w2"),
        )
        return SparseMoeBlock(ctx, f"{name}.gate", experts, Routing(top_k, normalize=True))
