"""GPT-OSS: attention with sinks, windows on every other layer, and experts with biases and clamped gates."""

from __future__ import annotations

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.families.gpt_oss.experts import GptOssExperts
from mvllm.layers.context import BuildContext
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import num_experts


class GptOssForCausalLM(LlamaForCausalLM):
    """`GptOssForCausalLM` of Hugging Face checkpoints, in floats or with experts in MXFP4."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without `layer_types`, even layers have a window."""
        windows = layer_windows(config, lambda layer: layer % 2 == 1)
        bias = bool(config.hf_config.get("attention_bias", True))
        return LlamaOptions(windows=windows, qkv_bias=bias, output_bias=bias, sinks=True)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        count, top_k = num_experts(hf, "num_local_experts", "num_experts"), hf.positive_int("num_experts_per_tok", 4)
        experts = GptOssExperts(
            ctx,
            f"{name}.experts",
            hidden_size,
            hf.positive_int("intermediate_size"),
            num_experts=count,
            top_k=top_k,
            alpha=hf.positive_number("swiglu_alpha", 1.702),
            limit=hf.positive_number("swiglu_limit", 7.0),
        )
        routing = Routing(top_k, "softmax_of_chosen")
        return SparseMoeBlock(ctx, f"{name}.router", experts, routing, bias=True)
