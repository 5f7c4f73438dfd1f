"""DeepSeek V2 and V3: multi-head latent attention, dense first layers, then routed and shared experts."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mla_attention import MLAAttention, MLAConfig
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, shared_mlp


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """`DeepseekV2ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The rotary embedding is interleaved unless the config disables it."""
        hf = config.hf_config
        return LlamaOptions(
            mlp_bias=bool(hf.get("mlp_bias", False)),
            interleaved_rotary=bool(hf.get("rope_interleave", True)),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        hf = self.config.hf_config
        shape = MLAConfig(
            hidden_size=self.config.hidden_size,
            num_heads=self.config.num_heads,
            q_lora_rank=hf.positive_int("q_lora_rank") if "q_lora_rank" in hf else None,
            kv_lora_rank=hf.positive_int("kv_lora_rank"),
            qk_nope_head_dim=hf.positive_int("qk_nope_head_dim"),
            qk_rope_head_dim=hf.positive_int("qk_rope_head_dim"),
            v_head_dim=hf.positive_int("v_head_dim"),
            bias=bool(hf.get("attention_bias", False)),
        )
        return MLAAttention(ctx, f"model.layers.{layer}.self_attn", shape, rotary)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        if layer < hf.get("first_k_dense_replace", self.dense_layers):
            return super().build_mlp(ctx, options, layer)
        check_activation(hf)
        count, size = hf.positive_int("n_routed_experts"), hf.positive_int("moe_intermediate_size")
        routing, bias = self.routing(), options.mlp_bias
        num_shared = hf.positive_int("n_shared_experts") if hf.get("n_shared_experts") else 0
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=routing.top_k),
            routing,
            correction=f"{name}.gate.e_score_correction_bias" if self.has_correction_bias else None,
            router_dtype=torch.float32,
            shared_experts=shared_mlp(self.config, ctx, f"{name}.shared_experts", size * num_shared, bias=bias)
            if num_shared
            else None,
        )

    dense_layers = 0
    """Default of `first_k_dense_replace`: the number of layers without experts."""
    has_correction_bias = False
    """Whether the router has `e_score_correction_bias`."""

    def routing(self) -> Routing:
        """Softmax routing; with `group_limited_greedy` limited to the groups with the best experts.

        `norm_topk_prob` is ignored, as in transformers.
        """
        hf = self.config.hf_config
        method, top_k = hf.get("topk_method", "greedy"), hf.positive_int("num_experts_per_tok")
        scale = hf.positive_number("routed_scaling_factor", 1.0)
        if method == "greedy":
            return Routing(top_k, scale=scale)
        if method == "group_limited_greedy":
            groups, chosen = hf.positive_int("n_group"), hf.positive_int("topk_group")
            return Routing(top_k, scale=scale, num_groups=groups, top_groups=chosen)
        raise ModelError(
            f"{hf.source}: 'topk_method' should be 'greedy' or 'group_limited_greedy' in this family, found {method!r}."
        )


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """`DeepseekV3ForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    dense_layers = 3
    has_correction_bias = True

    def routing(self) -> Routing:
        """Sigmoid routing with a correction bias, limited to the groups with the best two-score sums."""
        hf = self.config.hf_config
        return Routing(
            hf.positive_int("num_experts_per_tok"),
            "sigmoid",
            normalize=bool(hf.get("norm_topk_prob", True)),
            scale=hf.positive_number("routed_scaling_factor", 2.5),
            num_groups=hf.positive_int("n_group", 8),
            top_groups=hf.positive_int("topk_group", 4),
            group_by="best_two",
        )

    def ignores(self, name: str) -> bool:
        layer = self.layer_names.match(name)
        num_mtp_layers = self.config.hf_config.get("num_nextn_predict_layers", 0)
        if layer is not None and 0 <= int(layer.group(1)) - self.config.num_layers < num_mtp_layers:
            return True
        return super().ignores(name)
