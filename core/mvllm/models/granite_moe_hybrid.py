"""Granite 4: Granite with Mamba-2 layers instead of attention in most layers, and shared and routed experts.

Models without routed experts (`num_local_experts` = 0) have the shared expert only. Models whose
`position_embedding_type` is not `rope` have no position embedding. Of GGUF files (`fused_mlp` is false then), gate and
up of an MLP are separate matrices, and experts are read one by one.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.models.granite import GraniteForCausalLM
from mvllm.models.layer_kinds import layer_kinds
from mvllm.models.llama import LlamaOptions
from mvllm.models.mamba_hybrid import MAMBA, OLD_NAMES, MambaBlock, mamba2_config
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import check_activation


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """`GraniteMoeHybridForCausalLM` of Hugging Face checkpoints."""

    module_names = ModuleNames(
        {"shared_mlp.input_linear": "shared_mlp.gate_up_proj", "shared_mlp.output_linear": "shared_mlp.down_proj"}
    )

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Granite's, without rotary embedding unless the config asks for it."""
        options = super().options(config)
        if config.hf_config.get("position_embedding_type") == "rope":
            return options
        return replace(options, nope_layers=frozenset(range(config.num_layers)))

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        if layer_kinds(self.config, MAMBA, old_names=OLD_NAMES)[layer] == MAMBA:
            return MambaBlock(ctx, f"model.layers.{layer}.mamba", mamba2_config(self.config))
        return super().build_attention(ctx, options, rotary, layer)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}", self.config.hidden_size
        size, act = hf.positive_int("shared_intermediate_size", 1024), hf.get("hidden_act", "silu")
        fused = bool(hf.get("fused_mlp", True))
        shared = GatedMLP(ctx, f"{name}.shared_mlp", hidden_size, size, act, bias=False, fused=fused)
        if hf.get("num_local_experts", 8) == 0:
            return shared
        check_activation(hf)
        count, top_k = hf.positive_int("num_local_experts", 8), hf.positive_int("num_experts_per_tok", 2)
        name, size = f"{name}.block_sparse_moe", hf.positive_int("intermediate_size")
        experts: FusedMoE | StackedMoE
        if fused:
            names = "input_linear.weight", "output_linear.weight"
            experts = StackedMoE(ctx, name, hidden_size, size, num_experts=count, top_k=top_k, names=names)
        else:
            experts = FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k)
        routing = Routing(top_k, "softmax_of_chosen")
        return SparseMoeBlock(ctx, f"{name}.router.layer", experts, routing, shared_experts=shared)
