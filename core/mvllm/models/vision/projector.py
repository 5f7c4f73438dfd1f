"""TwoLayerProjector: features of a vision tower to embeddings of the language model."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import LayerNorm

_NORM_EPS = 1e-5


class TwoLayerProjector(nn.Module):
    """Two linear layers with an activation between them, in some families after a norm.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module, which holds linear_1 and linear_2, and layer_norm.
        in_features: Elements of a patch's features, or of a row of shuffled patches.
        hidden_size: Elements of an embedding.
        act: The activation, by its name in checkpoints.
        bias: Whether both layers have biases.
        norm: Whether there is a norm.
        inner_size: Result of the first layer; `hidden_size` by default.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        in_features: int,
        hidden_size: int,
        act: str,
        *,
        bias: bool,
        norm: bool = False,
        inner_size: int | None = None,
    ) -> None:
        super().__init__()
        inner_size = inner_size or hidden_size
        self.norm = LayerNorm(ctx, f"{name}.layer_norm", in_features, _NORM_EPS) if norm else None
        self.first = ReplicatedLinear(ctx, f"{name}.linear_1", in_features, inner_size, bias=bias)
        self.second = ReplicatedLinear(ctx, f"{name}.linear_2", inner_size, hidden_size, bias=bias)
        self._act = activation(ctx, act, inner_size)

    @classmethod
    def read(
        cls, ctx: BuildContext, in_features: int, config: ModelConfig, *, bias: bool | None = None
    ) -> TwoLayerProjector:
        """The module `multi_modal_projector` of a checkpoint. Without `bias`, config.json says whether it has them."""
        hf = config.hf_config
        bias = bool(hf.get("multimodal_projector_bias", True)) if bias is None else bias
        act = hf.get("projector_hidden_act", "gelu")
        return cls(ctx, "multi_modal_projector", in_features, config.hidden_size, act, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, hidden_size]."""
        x = x if self.norm is None else self.norm(x)
        return self.second(self._act(self.first(x)))
