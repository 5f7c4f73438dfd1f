"""DeepSeek V2, V3 and V3.2: multi-head latent attention, dense first layers, then routed and shared experts.

V3.2 attends to the `index_topk` tokens that an indexer selects for each query. Of a sequence that is no longer than
that, these are all tokens: with `max_model_len` up to `index_topk` the layer is V3's, and the indexer is not loaded.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mla_attention import MLAAttention, MLAConfig
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_indexer import SparseConfig
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, grouped_routing, has_dense_mlp, shared_mlp


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
        shape = MLAConfig.from_config(self.config)
        return MLAAttention(ctx, f"model.layers.{layer}.self_attn", shape, rotary, self.sparse_attention(layer))

    def sparse_attention(self, layer: int) -> SparseConfig | None:
        """Sparse attention of a layer; None if it attends to all tokens."""
        return None

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        if self.is_dense(layer):
            return super().build_mlp(ctx, options, layer)
        check_activation(hf)
        count, size = hf.positive_int(self.num_experts_key), hf.positive_int("moe_intermediate_size")
        routing, bias = self.routing(), options.mlp_bias
        num_shared = hf.get(self.num_shared_key, self.num_shared_experts) or 0
        if isinstance(num_shared, bool) or not isinstance(num_shared, int) or num_shared < 0:
            raise ModelError(f"{hf.source}: {self.num_shared_key!r} should be an integer >= 0, found {num_shared!r}.")
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=routing.top_k),
            routing,
            correction=f"{name}.{self.correction_name}" if self.correction_name is not None else None,
            router_dtype=torch.float32,
            shared_experts=shared_mlp(self.config, ctx, f"{name}.shared_experts", size * num_shared, bias=bias)
            if num_shared
            else None,
        )

    dense_layers = 0
    """Default of `first_k_dense_replace`: the number of layers without experts."""
    num_experts_key = "n_routed_experts"
    """Key of the number of routed experts."""
    num_shared_key = "n_shared_experts"
    """Key of the number of shared experts."""
    num_shared_experts = 0
    """Default of that number."""
    correction_name: str | None = None
    """The correction bias of the router, within the checkpoint's module of the MLP; None if it has none."""

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts: `mlp_layer_types`, or else the first `first_k_dense_replace` layers."""
        first = self.config.hf_config.get("first_k_dense_replace", self.dense_layers)
        return has_dense_mlp(self.config, layer, lambda number: bool(number < first))

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
    correction_name = "gate.e_score_correction_bias"
    routing_defaults: tuple[float, int, int] = (2.5, 8, 4)
    """Defaults of `routed_scaling_factor`, `n_group` and `topk_group`."""

    def routing(self) -> Routing:
        """Sigmoid routing with a correction bias, limited to the groups with the best two-score sums."""
        return grouped_routing(self.config.hf_config, "sigmoid", defaults=self.routing_defaults)

    def ignores(self, name: str) -> bool:
        layer = self.layer_names.match(name)
        num_mtp_layers = self.config.hf_config.get("num_nextn_predict_layers", 0)
        if layer is not None and 0 <= int(layer.group(1)) - self.config.num_layers < num_mtp_layers:
            return not self.stage.first <= int(layer.group(1)) < self.stage.stop or super().ignores(name)
        return super().ignores(name)


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """`DeepseekV32ForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    indexer_names = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.")
    index_heads = 64
    """Default of `index_n_heads`."""
    interleaved_indexer = False
    """Whether the rotary embedding of the indexer is interleaved. That of the attention always is."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The rotary embedding is always interleaved."""
        return replace(super().options(config), interleaved_rotary=True)

    def sparse_attention(self, layer: int) -> SparseConfig | None:
        """With sequences longer than `index_topk`, each layer has an indexer.

        Raises:
            ModelError: The checkpoint has no query latent, or index heads are smaller than their rotary part.
        """
        hf = self.config.hf_config
        top_k = hf.positive_int("index_topk", 2048)
        if self.config.max_model_len <= top_k:
            return None
        if "q_lora_rank" not in hf:
            raise ModelError(f"{hf.source}: the indexer reads the query latent, but q_lora_rank is not set.")
        head_dim, rotary_dim = hf.positive_int("index_head_dim", 128), hf.positive_int("qk_rope_head_dim")
        if head_dim < rotary_dim:
            raise ModelError(
                f"{hf.source}: index_head_dim should be at least qk_rope_head_dim = {rotary_dim}, found {head_dim}."
            )
        num_heads = hf.positive_int("index_n_heads", self.index_heads)
        return SparseConfig(top_k, num_heads, head_dim, self.interleaved_indexer, self.shares_selection(layer))

    def shares_selection(self, layer: int) -> bool:
        """Whether a layer attends to the tokens that the indexer of an earlier layer has selected."""
        return False

    def ignores(self, name: str) -> bool:
        layer = self.indexer_names.match(name)
        if layer is not None and self.stage.first <= int(layer.group(1)) < self.stage.stop:
            sparse = self.sparse_attention(int(layer.group(1)))
            return sparse is None or sparse.is_shared
        return super().ignores(name)
