"""DraftHead: a small model that reads hidden states of the served model and predicts the token after the next one.

    position            p                p + 1
    served model        token p          token p + 1      ──> token p + 2
                        hidden p ──┐
    draft head                     └──> (hidden p, token p + 1) ──> a draft of token p + 2

So the head computes position p when token p + 1 is known, and its keys and values of a position depend on the token
behind it. MTP modules, EAGLE and EAGLE-3 are such heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.models.causal_lm import CausalLM


class DraftHead(CausalLM):
    """A draft head on one rank. It is not split into pipeline stages.

    A head that has no embedding or no output matrix of its own in the checkpoint uses that of the served model, see
    `share`. Subclasses build their layers in `__init__`.

    Attributes:
        is_of_served_checkpoint: Its weights are tensors of the served model's checkpoint, so whatever updates the
            model's weights updates the head's as well.
    """

    is_of_served_checkpoint: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self._shared: dict[str, nn.Module] = {}  # not submodules: the served model loads them

    @classmethod
    def for_target(cls, config: ModelConfig, ctx: BuildContext, target: CausalLM) -> Self:
        """Builds the head without values.

        Args:
            config, ctx: As for models.
            target: The served model on this rank, which is on the last pipeline stage.
        """
        return cls(config, ctx)

    def share(self, target: CausalLM) -> None:
        """Takes over the embedding and the output matrix of the served model, where this head has none.

        Args:
            target: The served model, loaded; on a single pipeline stage.
        """
        for name in ("embed_tokens", "lm_head"):
            module = getattr(target, name, None)
            if isinstance(module, nn.Module):
                self._shared[name] = module

    def combine(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> torch.Tensor:
        """What `forward` reads of the served model in a step: [T, hidden_size].

        Args:
            hidden, layer_states: As in DraftStep; rows of positions whose next token is known.
        """
        return hidden

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the head.

        Args:
            input_ids: [T]: the token behind each position.
            positions: [T].
            step: Attention metadata.
            intermediate: [T, hidden_size]: from `combine`; behind the step, what the pass before has returned.

        Returns:
            [T, hidden_size]: the input of `compute_logits`, and of the pass for the next draft token.
        """

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, columns of this head] to [n, vocab_size of the served model]. For heads with fewer tokens."""
        return logits
