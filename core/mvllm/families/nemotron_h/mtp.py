"""The multi-token-prediction module of Nemotron-H: a few blocks, by default attention and then experts."""

from __future__ import annotations

import torch

from mvllm.config.model import ModelConfig
from mvllm.families.nemotron_h.model import NemotronHForCausalLM, mtp_block_kinds
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.norm import RMSNorm
from mvllm.models.mtp_head import MTPHead, MTPNames


class NemotronHMTP(MTPHead, NemotronHForCausalLM):
    """The MTP module of `NemotronHForCausalLM`. What is behind its last block has that block's number."""

    names = MTPNames(
        "mtp.layers.",
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.0.eh_proj",
        "mtp.layers.{last}.final_layernorm",
    )
    embedding_name = "model.embeddings"

    @classmethod
    def num_layers(cls, config: ModelConfig) -> int:
        return len(mtp_block_kinds(config))

    def block_kind(self, layer: int) -> str:
        return mtp_block_kinds(self.config)[layer - self.config.num_layers]

    def build_norm(self, ctx: BuildContext, name: str) -> RMSNorm:
        return RMSNorm(ctx, name, self.config.hidden_size, self.norm_eps())

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        assert residual is not None, "a module has blocks"
        return x, residual
