"""What models have in common that generate nothing: no head that gives tokens, and perhaps one that gives scores."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.models.causal_lm import CausalLM


class PoolingModel(CausalLM):
    """A model without its language-model head. Stands before the class of a decoder, whose head is then not built."""

    ignored_names = re.compile(r"^lm_head\.|(^|\.)rotary_emb\.inv_freq$")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("requests for tokens are refused at the door")

    def _build_head(
        self, ctx: BuildContext, embedding_name: str, size: int, embedding: VocabEmbedding | None
    ) -> LMHead | None:
        return None


class ScoreHead(nn.Module):
    """Scores of a decoder's last state: one matrix.

    Args:
        ctx: Build context.
        hidden_size: Of the model.
        num_labels: Scores.
    """

    def __init__(self, ctx: BuildContext, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.score = ReplicatedLinear(ctx, "score", hidden_size, num_labels, bias=False)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, labels]."""
        return self.score(pooled)
