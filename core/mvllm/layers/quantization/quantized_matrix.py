"""QuantizedMatrix: stages a layer's quantized tensors, then provides its linear op and weight."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.quantized_linear import QuantizedWeight
from mvllm.ops.quantized_moe import ExpertWeight
from mvllm.ops.registry import ResolvedOp

Product = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
"""(x [..., num_columns], weight, bias [out_features] or None) to [..., out_features], as the operation `linear`."""

Lookup = Callable[..., torch.Tensor]
"""The operation `embedding`, or a provider's lookup in a prepared weight."""

_OWN_PAGES = 1 << 17
"""Size in bytes from which a staged tensor has its own memory mapping. Linux allows 65,530 mappings per process, of
which adjacent ones count once."""

ExpertFacts = tuple[str, tuple[tuple[str, Any], ...]]
"""Name of a linear operation, and a weight's facts without sizes and bias, sorted, as the facts of `quantized_moe`."""


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

    def fuse_silu_and_mul(self, ctx: BuildContext, activation: ResolvedOp) -> bool:
        """Fuses the product and the following `silu_and_mul` into one operation, if an op provider has it.

        Args:
            ctx: The build context of the matrix.
            activation: The operation that follows the product otherwise.

        Returns:
            Whether the linear op of `finish` includes the activation; False by default.
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
        self._op: ResolvedOp | None = None
        if not layout.is_expert:
            self._op = ctx.op("quantized_linear", out_features=layout.out_features, **self._facts)

    @property
    def num_groups(self) -> int:
        """Scales in a row."""
        return -(-self.layout.num_columns // self.group_size)

    @abstractmethod
    def read(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        """The weight on the host, and its column order: column i is multiplied with input element `order[i]`.

        The order is None if columns are in input order.
        """

    def fuse_silu_and_mul(self, ctx: BuildContext, activation: ResolvedOp) -> bool:
        assert self._op is not None, "an expert has no activation of its own"
        fused = ctx.op("quantized_linear_silu_and_mul", size=self.layout.out_features // 2, **self._facts)
        if not fused.may_replace(self._op, activation):
            return False
        self._op = fused
        return True

    def finish(self) -> tuple[Product, Any]:
        assert self._op is not None, "an expert has no product of its own"
        loaded, order = self.read()
        weight, partition = on_device(loaded, self._device), self.layout.partition
        of_groups = None if partition == 1 and self.num_groups % self._num_devices else partition
        weight = replace(
            weight,
            values=self._place(weight.values, partition),
            scales=self._place(weight.scales, of_groups),
            zero_points=None if weight.zero_points is None else self._place(weight.zero_points, of_groups),
        )
        prepared = weight if self._op.prepare is None else self._op.prepare(weight)
        function: Product = self._op.function
        return function if order is None else OrderedProduct(function, order.to(self._device)), prepared

    def expert_weight(self) -> QuantizedWeight:
        loaded, order = self.read()
        assert order is None, "matrices with a column order have no expert_facts"
        return on_device(loaded, self._device)

    def _facts_of_expert(self) -> ExpertFacts:
        """The `expert_facts` of a matrix without column order."""
        return integer_facts(self.layout.num_columns, self.format)

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        loaded, order = self.read()
        floats = loaded.dequantize()
        if order is not None:
            floats = torch.empty_like(floats).index_copy_(1, order, floats)
        return floats.to(device, dtype)

    def empty_weight(self) -> QuantizedWeight:
        """A zero weight on the host."""
        return empty_integer_weight(self.layout.out_features, self.layout.num_columns, self.format)


def empty_integer_weight(out_features: int, in_features: int, format: IntegerFormat) -> QuantizedWeight:
    """A zero weight on the host. Rows have one group if its size is None or above `in_features`."""
    group_size = min(format.group_size or in_features, in_features)
    groups = out_features, -(-in_features // group_size)
    return QuantizedWeight(
        torch.zeros(out_features, in_features, dtype=torch.int8),
        torch.zeros(groups, dtype=torch.float32),
        None if format.symmetric else torch.zeros(groups, dtype=torch.int8),
        group_size,
        format.bits,
        format.int8_activations,
    )


def on_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The weight on the device; a copy only if it is elsewhere."""
    zero_points = None if weight.zero_points is None else weight.zero_points.to(device)
    return replace(weight, values=weight.values.to(device), scales=weight.scales.to(device), zero_points=zero_points)


def integer_facts(in_features: int, format: IntegerFormat) -> ExpertFacts:
    """The facts of a weight of `empty_integer_weight`."""
    facts = {
        "bits": format.bits,
        "group_size": min(format.group_size or in_features, in_features),
        "symmetric": format.symmetric,
        "int8_activations": format.int8_activations,
    }
    return expert_facts("quantized_linear", facts)


def expert_facts(op: str, facts: Mapping[str, Any]) -> ExpertFacts:
    """The facts of a linear operation as facts of an expert."""
    return op, tuple(sorted((k, v) for k, v in facts.items() if k not in ("in_features", "out_features", "bias")))


def staging(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A host parameter for a checkpoint tensor, filled with zeros. Its memory is allocated on first write.

    Large ones have their own memory mapping, which is returned to the system when they are freed. The C library's heap
    keeps freed memory between used blocks, so that loading would need the staging memory of all layers in addition to
    the results.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= _OWN_PAGES:
        with suppress(OSError):  # too many mappings
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return nn.Parameter(torch.frombuffer(pages, dtype=dtype).view(shape), requires_grad=False)
    # Not torch.zeros, which starts its threads for each of hundreds of tensors: slow if other programs use the cores.
    values = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
    return nn.Parameter(values, requires_grad=False)


@dataclass(frozen=True)
class OrderedProduct:
    """A linear op on inputs in the column order of the weight. The order is a field, where a trace finds it.

    Attributes:
        function: The linear op.
        order: As `IntegerMatrix.read` returns it, on the device.
    """

    function: Product
    order: torch.Tensor

    def __call__(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self.function(x.index_select(-1, self.order), weight, bias)
