"""ERNIE 4.5 with experts: Llama with interleaved rotary embedding, and routed and shared experts in some layers."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, num_experts, shared_mlp
from mvllm.models.mtp_head import LlamaMTPHead, MTPNames

_THETA = 500_000.0


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """`Ernie4_5_MoeForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    ties_embeddings_by_default = True
    ignored_names = re.compile(r"(^|\.)(rotary_emb\.inv_freq|mtp_\w+\..*)$")

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """All linear layers are without biases.

        Raises:
            ModelError: The config asks for biases, which the head would have, too.
        """
        hf = config.hf_config
        if hf.get("use_bias", False):
            raise ModelError(
                f"{hf.source}: use_bias is set: heads with a bias are not supported in this family. Set "
                "model_impl='transformers' to run the model through transformers."
            )
        return LlamaOptions(
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            rope=RopeParameters.from_config(hf, config.head_size, theta=_THETA),
            interleaved_rotary=True,
        )

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        if not self._is_sparse(layer):
            return super().build_mlp(ctx, options, layer)
        check_activation(hf)
        size, num_shared = hf.positive_int("moe_intermediate_size", 1536), hf.get("moe_num_shared_experts", 2) or 0
        count, top_k = (
            num_experts(hf, "moe_num_experts", "num_experts"),
            num_experts(hf, "moe_k", "num_experts_per_tok"),
        )
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k),
            Routing(top_k, normalize=True),
            correction=f"{name}.moe_statics.e_score_correction_bias",
            correction_is_row=True,
            router_dtype=torch.float32,
            shared_experts=shared_mlp(self.config, ctx, f"{name}.shared_experts", size * num_shared)
            if num_shared
            else None,
        )

    def _is_sparse(self, layer: int) -> bool:
        hf = self.config.hf_config
        first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
        if not isinstance(first, int) or not isinstance(last, int):
            raise ModelError(
                f"{hf.source}: 'moe_layer_start_index' and 'moe_layer_end_index' should be layer numbers, found "
                f"{first!r} and {last!r}."
            )
        last = self.config.num_layers - 1 if last == -1 else last
        return first <= layer <= last and (layer + 1) % hf.positive_int("moe_layer_interval", 1) == 0


class Ernie4_5_MoeMTP(LlamaMTPHead, Ernie4_5_MoeForCausalLM):
    """The multi-token-prediction module of `Ernie4_5_MoeForCausalLM`: without experts, and with the model's norm."""

    names = MTPNames(
        "model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None
    )

    def _is_sparse(self, layer: int) -> bool:
        return False
