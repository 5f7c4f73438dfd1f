"""The multi-token-prediction modules of DeepSeek V3 and V3.2, and the base of those of GLM."""

from __future__ import annotations

from mvllm.families.deepseek.model import DeepseekV3ForCausalLM, DeepseekV32ForCausalLM
from mvllm.models.mtp_head import LlamaMTPHead


class SparseMTPHead(LlamaMTPHead):
    """An MTP module with experts."""

    def is_dense(self, layer: int) -> bool:
        """False."""
        return False


class DeepseekV3MTP(SparseMTPHead, DeepseekV3ForCausalLM):
    """The MTP module of `DeepseekV3ForCausalLM`."""


class DeepseekV32MTP(SparseMTPHead, DeepseekV32ForCausalLM):
    """The MTP module of `DeepseekV32ForCausalLM`, whose layer has an indexer of its own."""
