"""QuantizedMatrix: what a quantization method returns for a layer's matrix, from its tensors to its linear op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.quantized_moe import ExpertWeight
from mvllm.ops.registry import ResolvedOp

Product = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
"""(x [..., num_columns], weight, bias [out_features] or None) to [..., out_features], as the operation `linear`."""

Lookup = Callable[..., torch.Tensor]
"""The operation `embedding`, or a provider's lookup in a prepared weight."""

ExpertFacts = tuple[str, tuple[tuple[str, Any], ...]]
"""Name of a linear operation, and a weight's facts without sizes and bias, sorted, as the facts of `quantized_moe`."""


class OpSource(Protocol):
    """The operations of a worker in a compute dtype: a BuildContext."""

    def op(self, name: str, **facts: object) -> ResolvedOp:
        """The implementation of operation `name`."""


class QuantizedMatrix(nn.Module, ABC):
    """The `weight` of a quantized layer until its tensors are loaded.

    For an expert's matrix (`layout.is_expert`), its layer calls `expert_weight` or `dequantized` instead of `finish`.

    Attributes:
        checkpoint_has_floats: Whether a layer may instead read `.weight` of the parts as floats.
    """

    checkpoint_has_floats: ClassVar[bool] = False

    @abstractmethod
    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""

    @abstractmethod
    def finish(self) -> tuple[Product, Any]:
        """Called once, when every target is filled: the linear op and its weight. This object is dropped."""

    def can_reorder_rows(self, order: torch.Tensor) -> bool:
        """Whether `reorder_rows` is supported for this order. The default is False."""
        return False

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Called before `finish`: the rows of its weight are in this order.

        Args:
            order: [out_features], host: for each row of the result, its index in the layout.
        """
        raise NotImplementedError(f"{type(self).__name__} does not reorder rows")

    @property
    def lookup(self) -> Lookup | None:
        """The operation `embedding` on the weight of `finish`; None (the default) if its rows cannot be read.

        It lets the token embedding of a tied head read the head's weight, so that it is not loaded separately.
        """
        return None

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called instead of `finish`: the dequantized matrix, [out_features, num_columns].

        For layers with their own matrix products. The default multiplies unit vectors; subclasses that can dequantize
        directly should override it.
        """
        product, weight = self.finish()
        return product(torch.eye(num_columns, dtype=dtype, device=device), weight, None).T.contiguous()

    def expert_facts(self) -> ExpertFacts | None:
        """The operation of `expert_weight`, and its facts; None (the default) if there is only `dequantized`."""
        return None

    def keep_quantized(self) -> None:
        """Called before `targets` if `expert_weight` will be called."""
        return

    def tensors_loaded(self) -> None:
        """Called before `expert_weight`, when every target is filled. May reduce the staging memory.

        The call is optional.
        """
        return

    def expert_weight(self) -> ExpertWeight:
        """Called instead of `finish`: the weight, on the device. This object is dropped."""
        raise NotImplementedError(f"{type(self).__name__} has expert_facts without expert_weight")

    def fuse_silu_and_mul(self, ctx: OpSource, activation: ResolvedOp) -> bool:
        """Fuses the product and the following `silu_and_mul` into one operation, if an op provider has it.

        Args:
            ctx: The build context of the matrix.
            activation: The operation that follows the product otherwise.

        Returns:
            Whether the linear op of `finish` includes the activation; False by default.
        """
        return False
