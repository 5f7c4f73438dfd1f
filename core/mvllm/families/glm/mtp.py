"""The multi-token-prediction modules of GLM-4.5 and later: DeepSeek's form."""

from __future__ import annotations

from mvllm.families.deepseek.mtp import SparseMTPHead
from mvllm.families.glm.glm4_moe import Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM
from mvllm.families.glm.glm_moe_dsa import GlmMoeDsaForCausalLM


class Glm4MoeMTP(SparseMTPHead, Glm4MoeForCausalLM):
    """The MTP module of `Glm4MoeForCausalLM`."""


class Glm4MoeLiteMTP(SparseMTPHead, Glm4MoeLiteForCausalLM):
    """The MTP module of `Glm4MoeLiteForCausalLM`."""


class GlmMoeDsaMTP(SparseMTPHead, GlmMoeDsaForCausalLM):
    """The MTP module of `GlmMoeDsaForCausalLM`, whose layer has an indexer of its own."""

    def shares_selection(self, layer: int) -> bool:
        """False."""
        return False
