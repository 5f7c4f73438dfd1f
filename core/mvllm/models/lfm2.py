"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, rope_settings
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.short_conv import ShortConv
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.layer_kinds import ATTENTION, layer_kinds
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions
from mvllm.models.module_names import ModuleNames

_NAMES = ModuleNames(
    {
        "model.embedding_norm": "model.norm",
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "feed_forward": "mlp",
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
    }
)
"""Parts of names in checkpoints, and their names in Llama's."""
_THETA = 1_000_000.0


class Lfm2ForCausalLM(LlamaForCausalLM):
    """`Lfm2ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True
    module_names = _NAMES

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Queries and keys are normalised."""
        hf = config.hf_config
        rope = {"rope_theta": hf.positive_number("rope_theta", _THETA), **rope_settings(hf)}
        return LlamaOptions(
            qk_norm=True,
            norms=LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm"),
            eps=hf.positive_number("norm_eps", 1e-5),
            rope=RopeParameters.from_config(hf, config.head_size, settings=rope),
        )

    @property
    def ties_head(self) -> bool:
        """`tie_embedding` is the name of the setting in early checkpoints."""
        return bool(self.config.hf_config.get("tie_embedding", super().ties_head))

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        hf = self.config.hf_config
        attention = hf.get("full_attn_idxs", list(range(self.config.num_layers)))
        if layer_kinds(self.config, "conv", is_attention=lambda number: number in attention)[layer] == ATTENTION:
            return super().build_attention(ctx, options, rotary, layer)
        return ShortConv(
            ctx,
            f"model.layers.{layer}.conv",
            self.config.hidden_size,
            hf.positive_int("conv_L_cache", 3),
            bias=bool(hf.get("conv_bias", False)),
        )

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """`intermediate_size` is that of an MLP without gate, unless the config disables the adjustment."""
        hf = self.config.hf_config
        size = hf.positive_int("block_ff_dim" if "block_ff_dim" in hf else "intermediate_size", 12288)
        if hf.get("block_auto_adjust_ff_dim", True):
            size = int(hf.positive_number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            multiple = hf.positive_int("block_multiple_of", 256)
            size = -(-size // multiple) * multiple
        return self._mlp(ctx, layer, size)

    def _mlp(self, ctx: BuildContext, layer: int, size: int) -> nn.Module:
        return GatedMLP(ctx, f"model.layers.{layer}.mlp", self.config.hidden_size, size, "silu", bias=False)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """`Lfm2MoeForCausalLM` of Hugging Face checkpoints."""

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """Experts with sigmoid routing behind the first, dense layers."""
        hf, name = self.config.hf_config, f"model.layers.{layer}.mlp"
        if layer < hf.get("num_dense_layers", 2):
            return self._mlp(ctx, layer, hf.positive_int("intermediate_size"))
        top_k, size = hf.positive_int("num_experts_per_tok", 4), hf.positive_int("moe_intermediate_size")
        num_experts = hf.positive_int("num_experts", 32)
        experts = FusedMoE(ctx, f"{name}.experts", self.config.hidden_size, size, num_experts=num_experts, top_k=top_k)
        routing = Routing(
            top_k,
            "sigmoid",
            normalize=bool(hf.get("norm_topk_prob", True)),
            scale=hf.positive_number("routed_scaling_factor", 1.0),
        )
        correction = f"{name}.expert_bias" if hf.get("use_expert_bias", True) else None
        return SparseMoeBlock(ctx, f"{name}.gate", experts, routing, correction=correction)
