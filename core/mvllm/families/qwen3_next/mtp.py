"""The multi-token-prediction modules of Qwen3-Next and Qwen3.5: a layer with attention and gated heads."""

from __future__ import annotations

from torch import nn

from mvllm.families.qwen3_next.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from mvllm.families.qwen3_next.qwen3_next import GatedAttention, Qwen3NextForCausalLM
from mvllm.layers.context import BuildContext
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.llama import LlamaOptions
from mvllm.models.mtp_head import MTP_NAMES, LlamaMTPHead


class GatedMTPHead(LlamaMTPHead):
    """An MTP module with gated heads; with experts where the model has any."""

    names = MTP_NAMES

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        return GatedAttention(self.config, ctx, options, rotary, layer)

    def _is_sparse(self, layer: int) -> bool:
        return bool(self.config.hf_config.get("num_experts", 512) != 0)


class Qwen3NextMTP(GatedMTPHead, Qwen3NextForCausalLM):
    """The MTP module of `Qwen3NextForCausalLM`."""


class Qwen3_5MoeMTP(GatedMTPHead, Qwen3_5MoeForCausalLM):
    """The MTP module of `Qwen3_5MoeForCausalLM`."""


class Qwen3_5MTP(GatedMTPHead, Qwen3_5ForCausalLM):
    """The MTP module of `Qwen3_5ForCausalLM`."""
