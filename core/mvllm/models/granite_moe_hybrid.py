"""Granite 4: Granite with Mamba-2 layers instead of attention in most layers, and shared and routed experts.

Models without routed experts (`num_local_experts` = 0) have the shared expert only. Models whose
`position_embedding_type` is not `rope` have no position embedding. Of GGUF files (`fused_mlp` is false then), gate and
up of an MLP are separate matrices, and experts are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import shard_slice
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.granite import GraniteForCausalLM
from mvllm.models.llama import LlamaOptions
from mvllm.models.mamba_hybrid import MAMBA, MambaBlock, layer_kinds, mamba2_config
from mvllm.models.moe_config import check_activation


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """`GraniteMoeHybridForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Granite's, without rotary embedding unless the config asks for it."""
        options = super().options(config)
        if config.hf_config.get("position_embedding_type") == "rope":
            return options
        return replace(options, nope_layers=frozenset(range(config.num_layers)))

    def model_name(self, name: str) -> str:
        name = name.replace(".shared_mlp.input_linear", ".shared_mlp.gate_up_proj")
        return name.replace(".shared_mlp.output_linear", ".shared_mlp.down_proj")

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        if layer_kinds(self.config)[layer] == MAMBA:
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
        experts: FusedMoE
        if fused:
            experts = GraniteExperts(ctx.floats(), name, hidden_size, size, num_experts=count, top_k=top_k)
        else:
            experts = FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k)
        routing = Routing(top_k, "softmax_of_chosen")
        return SparseMoeBlock(ctx, f"{name}.router.layer", experts, routing, shared_experts=shared)


class GraniteExperts(FusedMoE):
    """Experts whose matrices are stacked in one checkpoint tensor each.

    input_linear    [experts, 2 · intermediate_size, hidden_size]    gate rows first
    output_linear   [experts, hidden_size, intermediate_size]
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
    ) -> None:
        super().__init__(ctx, name, hidden_size, intermediate_size, num_experts=num_experts, top_k=top_k)
        self.name, self._intermediate_size = name, intermediate_size
        self._band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        experts, outer, band = slice(0, self.num_experts), slice(0, self.hidden_size), self._band
        size, inner = band.stop - band.start, self._intermediate_size
        shape = (self.num_experts, 2 * inner, self.hidden_size)
        for first, destination in ((0, slice(0, size)), (inner, slice(size, 2 * size))):
            source = (experts, slice(first + band.start, first + band.stop), outer)
            yield (
                f"{self.name}.input_linear.weight",
                WeightTarget(self.gate_up, shape, source, (experts, destination, outer)),
            )
        shape = (self.num_experts, self.hidden_size, inner)
        yield (
            f"{self.name}.output_linear.weight",
            WeightTarget(self.down, shape, (experts, outer, band), (experts, outer, slice(0, size))),
        )
