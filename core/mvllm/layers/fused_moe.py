"""FusedMoE: the experts of a mixture of experts with a separate checkpoint tensor for each matrix of each expert.

Tensor parallelism shards every expert along its inner size, so that the load of the ranks does not depend on the
routing; `forward` returns this rank's summand of a sum over ranks. If a worker has several devices, each
holds some of the experts, or all of them if the number of experts is not a multiple of the number of devices.

Quantized experts stay quantized if the platform supports `quantized_moe` (quantized_experts.py). Otherwise experts of a
quantized checkpoint are dequantized after loading, and online quantization does not change experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.quantized_experts import QuantizedExperts, quantized_moe_op
from mvllm.layers.weight_target import WeightTarget


class FusedMoE(nn.Module):
    """Experts of two or three separate matrices each.

    Args:
        ctx: Build context.
        name: The checkpoint module whose children `0`, `1`, ... are the experts.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Number of experts, and experts per token.
        names: Checkpoint names of gate, up and down of an expert, or of up and down if it has no gate.
        op: The operation for floats: `moe`, `ungated_moe`, or `gelu_tanh_moe`, whose experts are always dequantized.
        op_facts: Further facts of that operation and of its form for quantized experts.

    Attributes:
        gate_up: [num_experts, 2 · size, hidden_size], where `size` is this rank's part of the inner size; up alone,
            [num_experts, size, hidden_size], if the experts have no gate. After loading the result of the op provider's
            `prepare`. None before that if the experts stay quantized.
        down: [num_experts, hidden_size, size], likewise.
        stays_quantized: Whether the experts' weights are not converted to floats.
    """

    gate_up: Any
    down: Any

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        op: str = "moe",
        **op_facts: object,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_experts = hidden_size, num_experts
        band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        size = band.stop - band.start
        self.partitions: Mapping[str, int] = {} if num_experts % ctx.num_devices else {"gate_up": 0, "down": 0}
        self._place = ctx.place
        sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "intermediate_size": size}
        facts = {**sizes, **op_facts}
        self._op = ctx.op(op, **facts)
        *upper_names, down_name = names
        outer, num_rows = slice(0, hidden_size), len(upper_names) * size
        self._layouts: list[tuple[MatrixLayout, MatrixLayout]] = []
        for e in range(num_experts):
            upper = tuple(
                Part(f"{name}.{e}.{matrix}", intermediate_size, band, slice(i * size, (i + 1) * size))
                for i, matrix in enumerate(upper_names)
            )
            lower = Part(f"{name}.{e}.{down_name}", hidden_size, outer, outer)
            self._layouts.append(
                (
                    MatrixLayout(upper, hidden_size, outer, num_rows, is_expert=True),
                    MatrixLayout((lower,), intermediate_size, band, hidden_size, is_expert=True),
                )
            )
        resolve = partial(quantized_moe_op, ctx, floats=self._op, facts=facts, gated=op == "moe")
        self._quantized = QuantizedExperts(ctx, self._layouts, None if op == "gelu_tanh_moe" else resolve)
        self.stays_quantized = self._quantized.op is not None
        if self._quantized.op is not None:
            self._moe, self.gate_up, self.down = self._quantized.op.function, None, None
            return
        self._moe = self._op.function
        self.gate_up = ctx.parameter(num_experts, num_rows, hidden_size)
        self.down = ctx.parameter(num_experts, hidden_size, size)
        for which, parameter in enumerate(("gate_up", "down")):
            if all(self._quantized.matrix(e, which) is not None for e in range(num_experts)):
                # No checkpoint tensor fills it directly.
                floats = getattr(self, parameter).data
                delattr(self, parameter)
                setattr(self, parameter, floats)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the weighted expert outputs; all ranks' results must be added.

        Args:
            x: [T, hidden_size].
            weights, ids: [T, top_k], float32 and int64: the experts of each token.

        Returns:
            [T, hidden_size].
        """
        if self.stays_quantized:
            return self._moe(x, self.gate_up, None, self.down, None, ids, weights, None, None)
        return self._moe(x, self.gate_up, self.down, ids, weights)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for e, layouts in enumerate(self._layouts):
            for which, (layout, parameter) in enumerate(zip(layouts, (self.gate_up, self.down), strict=True)):
                matrix = self._quantized.matrix(e, which)
                if matrix is not None:
                    yield from self._quantized.targets(matrix)
                    continue
                for name, target in float_targets(layout, parameter):
                    place = (e, *target.destination)
                    yield name, WeightTarget(parameter, target.source_shape, target.source, place)

    def tensor_loaded(self, name: str) -> None:
        """Called by the model when a checkpoint tensor of `weight_targets` is loaded and others are not."""
        self._quantized.tensor_loaded(name)

    def prepare_weights(self) -> None:
        """Converts the loaded experts to the op provider's form."""
        if self.stays_quantized:
            self.gate_up, self.down = self._quantized.prepare()
            return
        for e, which, matrix in self._quantized.pop():
            floats = (self.gate_up, self.down)[which].data
            floats[e] = matrix.dequantized(floats.shape[-1], floats.dtype, floats.device)
        for name in ("gate_up", "down"):
            if not isinstance(getattr(self, name), nn.Parameter):  # parameters are placed when they have been loaded
                setattr(self, name, self._place(getattr(self, name), self.partitions.get(name)))
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared


def quantization_of_layout(ctx: BuildContext, layout: MatrixLayout) -> QuantizedMatrix | None:
    """The quantized matrix of a layer without quantized op, to be dequantized; None if the checkpoint stores floats."""
    if ctx.quantization is None or ctx.quantization.quantizes_on_load:
        return None
    return ctx.quantized(layout)
