"""StarCoder2: Llama with layer norms, a plain MLP, biases everywhere, and a window on every layer."""

from __future__ import annotations

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """`Starcoder2ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Biases come together or not at all."""
        hf = config.hf_config
        bias = bool(hf.get("use_bias", True))
        return LlamaOptions(
            windows=(config.sliding_window,) * config.num_layers,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            norm=LayerNorm,
            eps=hf.positive_number("norm_epsilon", 1e-5),
            hidden_act=hf.get("hidden_act", "gelu_pytorch_tanh"),
        )

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """One matrix up, one down."""
        hf, name = self.config.hf_config, f"model.layers.{layer}.mlp"
        sizes = self.config.hidden_size, hf.positive_int("intermediate_size")
        assert options.hidden_act is not None, "options names it"
        return MLP(ctx, f"{name}.c_fc", f"{name}.c_proj", *sizes, options.hidden_act, bias=options.mlp_bias)
