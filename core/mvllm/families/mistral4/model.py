"""Mistral 4: DeepSeek's latent attention and experts, with softmax routing and Ministral 3's factor on queries.

Of GGUF files (`stacked_experts` is false then), experts are read one by one.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, rope_settings
from mvllm.families.deepseek.model import DeepseekV2ForCausalLM
from mvllm.layers.context import BuildContext
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.ministral3 import query_scaling
from mvllm.models.moe_config import check_activation, grouped_routing, shared_mlp
from mvllm.models.text_part import TextPart


class Mistral4ForCausalLM(TextPart, DeepseekV2ForCausalLM):
    """`Mistral4ForCausalLM` of Hugging Face checkpoints, and the text part of multimodal ones."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """`partial_rotary_factor` is the rotary part of a whole head; the attention rotates that part only."""
        hf = config.hf_config
        settings = {**rope_settings(hf), "partial_rotary_factor": 1.0}
        return replace(
            super().options(config),
            rope=RopeParameters.from_config(hf, config.head_size, settings=settings),
            query_scaling=query_scaling(hf, settings),
        )

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """Checkpoints store the experts of a layer in one tensor for each matrix, unless `stacked_experts` is false."""
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        if layer < hf.get("first_k_dense_replace", 0):
            return LlamaForCausalLM.build_mlp(self, ctx, options, layer)
        check_activation(hf)
        count, size = hf.positive_int("n_routed_experts"), hf.positive_int("moe_intermediate_size")
        routing = self.routing()
        shared_size = size * hf.positive_int("n_shared_experts", 1)
        is_stacked = bool(hf.get("stacked_experts", True))
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            StackedMoE(
                ctx,
                f"{name}.experts",
                hidden_size,
                size,
                num_experts=count,
                top_k=routing.top_k,
                is_stacked=is_stacked,
            ),
            routing,
            shared_experts=shared_mlp(self.config, ctx, f"{name}.shared_experts", shared_size),
        )

    def routing(self) -> Routing:
        """Softmax routing, limited to the groups with the best two-score sums."""
        return grouped_routing(self.config.hf_config, "softmax", top_k=4)
