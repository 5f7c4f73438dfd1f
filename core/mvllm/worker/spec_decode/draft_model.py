"""DraftModel: the model of a method of speculative decoding, which is loaded beside the served model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mvllm.config.model import ModelConfig
from mvllm.models.draft_head import DraftHead
from mvllm.worker.decoder_forward import DecoderForward, StepForward
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.space_logits import LogitsModel
from mvllm.worker.state_layers import step_backend_of

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


@dataclass(frozen=True)
class DraftModel:
    """A draft model or a draft head.

    Attributes:
        config: Its config.
        model: The model, with its weights.
    """

    config: ModelConfig
    model: CausalLM

    @property
    def is_head(self) -> bool:
        """Whether it reads hidden states of the served model."""
        return isinstance(self.model, DraftHead)

    @property
    def logits_model(self) -> LogitsModel:
        """What computes logits of its hidden states."""
        return self.model

    def combine(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> torch.Tensor | None:
        """What its forward pass gets of a step of the served model, see DraftHead; None if it is no head."""
        return self.model.combine(hidden, layer_states) if isinstance(self.model, DraftHead) else None

    def forward(self, layers: KVCacheLayers) -> StepForward:
        """Its forward pass.

        Args:
            layers: The attention layers of the rank, those of this model included.
        """
        groups = layers.attention_groups_of(self.model.attention_layers())
        return DecoderForward(self.model, groups, step_backend_of(self.model.state_layers()))
