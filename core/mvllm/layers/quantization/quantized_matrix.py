"""QuantizedMatrix: stages a layer's quantized tensors, then provides its linear op and weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.quantized_linear import QuantizedWeight
from mvllm.ops.registry import ResolvedOp

Product = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
"""(x [..., num_columns], weight, bias [out_features] or None) to [..., out_features], as the operation `linear`."""

Lookup = Callable[..., torch.Tensor]
"""The operation `embedding`, or a provider's lookup in a prepared weight."""


class QuantizedMatrix(nn.Module, ABC):
    """The `weight` of a quantized layer until its tensors are loaded."""

    @abstractmethod
    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""

    @abstractmethod
    def finish(self) -> tuple[Product, Any]:
        """Called once, when every target is filled: the linear op and its weight. This object is dropped."""

    @property
    def lookup(self) -> Lookup | None:
        """The operation `embedding` on the weight of `finish`; None (the default) if its rows cannot be read.

        With it the token embedding of a tied head is read from the head's weight, and is not loaded itself.
        """
        return None

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called instead of `finish`: the dequantized matrix, [out_features, num_columns].

        For layers with their own multiplication. The default multiplies unit vectors; subclasses should override it if
        they can dequantize directly.
        """
        product, weight = self.finish()
        return product(torch.eye(num_columns, dtype=dtype, device=device), weight, None).T.contiguous()

    def fuse_silu_and_mul(self, ctx: BuildContext, activation: ResolvedOp) -> bool:
        """Fuses the product and the following `silu_and_mul` into one operation, if an op provider has it.

        Args:
            ctx: The build context of the matrix.
            activation: The operation that follows the product otherwise.

        Returns:
            Whether the linear op of `finish` includes it; False by default.
        """
        return False


class IntegerMatrix(QuantizedMatrix):
    """An integer matrix for the operation `quantized_linear`.

    Args:
        ctx: Build context.
        layout: The parts of the matrix.
        format: Its format.

    Attributes:
        layout, format: As given.
        group_size: Columns on this rank that share a scale.
    """

    def __init__(self, ctx: BuildContext, layout: MatrixLayout, format: IntegerFormat) -> None:
        super().__init__()
        self.layout, self.format = layout, format
        size = layout.num_columns
        self.group_size = size if format.group_size is None else min(format.group_size, size)
        self._device, self._place, self._num_devices = ctx.device, ctx.place, ctx.num_devices
        self._facts = {
            "in_features": layout.num_columns,
            "bias": layout.bias,
            "bits": format.bits,
            "group_size": self.group_size,
            "symmetric": format.symmetric,
            "int8_activations": format.int8_activations,
        }
        self._op = ctx.op("quantized_linear", out_features=layout.out_features, **self._facts)

    @property
    def num_groups(self) -> int:
        """Scales in a row."""
        return -(-self.layout.num_columns // self.group_size)

    @abstractmethod
    def read(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        """The weight, on the host, and its column order: column i belongs to input element `order[i]`.

        The order is None if columns are in input order.
        """

    def fuse_silu_and_mul(self, ctx: BuildContext, activation: ResolvedOp) -> bool:
        fused = ctx.op("quantized_linear_silu_and_mul", size=self.layout.out_features // 2, **self._facts)
        if not fused.may_replace(self._op, activation):
            return False
        self._op = fused
        return True

    def finish(self) -> tuple[Product, Any]:
        loaded, order = self.read()
        partition = self.layout.partition
        of_groups = None if partition == 1 and self.num_groups % self._num_devices else partition
        weight = QuantizedWeight(
            self._place(loaded.values.to(self._device), partition),
            self._place(loaded.scales.to(self._device), of_groups),
            None if loaded.zero_points is None else self._place(loaded.zero_points.to(self._device), of_groups),
            loaded.group_size,
            loaded.bits,
            loaded.int8_activations,
        )
        prepared = weight if self._op.prepare is None else self._op.prepare(weight)
        function: Product = self._op.function
        return function if order is None else _with_order(function, order.to(self._device)), prepared

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        loaded, order = self.read()
        floats = loaded.dequantize()
        if order is not None:
            floats = torch.empty_like(floats).index_copy_(1, order, floats)
        return floats.to(device, dtype)

    def empty_weight(self) -> QuantizedWeight:
        """A zero weight on the host."""
        shape = (self.layout.out_features, self.num_groups)
        return QuantizedWeight(
            torch.zeros(self.layout.out_features, self.layout.num_columns, dtype=torch.int8),
            torch.zeros(shape, dtype=torch.float32),
            None if self.format.symmetric else torch.zeros(shape, dtype=torch.int8),
            self.group_size,
            self.format.bits,
            self.format.int8_activations,
        )


def staging(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A host parameter for a checkpoint tensor. Its memory is allocated on first write."""
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _with_order(function: Product, order: torch.Tensor) -> Product:
    def product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return function(x.index_select(-1, order), weight, bias)

    return product
