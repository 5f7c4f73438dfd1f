"""Base classes of models that return embeddings or class scores and have no language-model head."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.models.causal_lm import CausalLM


class PoolingModel(CausalLM):
    """A model without its language-model head.

    As the first base before a decoder's class it keeps that class from building the head.
    """

    ignored_names = re.compile(r"^lm_head\.|(^|\.)rotary_emb\.inv_freq$")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a pooling model has no language-model head")

    def _build_head(
        self, ctx: BuildContext, embedding_name: str, size: int, embedding: VocabEmbedding | None
    ) -> LMHead | None:
        return None


class SequenceClassificationModel(PoolingModel):
    """A decoder with a linear head (`score`) over the last hidden state of each prompt."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.last_stage_names = (*self.last_stage_names, "score.")
        if self.stage.is_last:
            self.scores = ScoreHead(ctx, config.hidden_size, config.kind.num_labels)


class ScoreHead(nn.Module):
    """The linear head of a SequenceClassificationModel.

    Args:
        ctx: Build context.
        hidden_size: Hidden size of the model.
        num_labels: Number of classes.
    """

    def __init__(self, ctx: BuildContext, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.score = ReplicatedLinear(ctx, "score", hidden_size, num_labels, bias=False)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, labels]."""
        return self.score(pooled)
