"""A draft head for tests: one Llama layer behind a projection of the target's state and the next token's embedding."""

from __future__ import annotations

import torch

from mvllm.config.draft_method import DraftMethod, DraftSettings, SpeculativeConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.models.causal_lm import CausalLM
from mvllm.models.draft_head import DraftHead


class LastTokenHead(DraftHead):
    """Predicts what the target predicts if its layers change nothing: from the embedding of the next token alone."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.lm_head = None

    def ignores(self, name: str) -> bool:
        return True

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert intermediate is not None and len(intermediate) == len(input_ids)
        hidden: torch.Tensor = self._shared["norm"](self._shared["embed_tokens"](input_ids))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._shared["lm_head"](hidden)
        return logits

    def share(self, target: CausalLM) -> None:
        self._shared = {name: getattr(target, name) for name in ("norm", "embed_tokens", "lm_head")}


class LastTokenMethod(DraftMethod):
    """Drafts with a LastTokenHead."""

    summary = "predicts from the last token"

    def read(self, settings: DraftSettings) -> SpeculativeConfig:
        return SpeculativeConfig(
            settings.method,
            settings.num_speculative_tokens(2),
            model=settings.target,
            proposer="mvllm.worker.spec_decode.head_proposer:HeadProposer",
            model_class=f"{__name__}:LastTokenHead",
            reads_hidden=True,
            reads_layers=(0, 1),
        )
